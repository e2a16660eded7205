"""Judges, which score sessions with a model, and the providers whose models they use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    model_validator,
)

from proxy.settings.rewards import RewardNumber
from proxy.settings.section import Section

ProviderName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
JudgeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ProviderSettings(Section):
    """An OpenAI-compatible endpoint. Only the installation's configuration has providers: a run, which its users may
    change, names one and sees neither its address nor its key."""

    base_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")]
    """The address before `/chat/completions`, such as `https://api.openai.com/v1`."""
    api_key: SecretStr | None = None
    """The key to send as a bearer token; None: none is sent."""
    structured: bool = True
    """Whether answers are requested as JSON of a schema (`response_format`). Switch it off for an endpoint that
    refuses that; answers are then read from the text."""
    prompt_price: NonNegativeFloat | None = None
    """Price of a million tokens of prompts, in any currency; None: the cost is unknown."""
    completion_price: NonNegativeFloat | None = None
    """Price of a million tokens of answers."""

    @model_validator(mode="after")
    def _has_both_prices(self) -> ProviderSettings:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("prompt_price and completion_price belong together: give both or neither")
        return self


class JudgeSettings(Section):
    """A judge of a run's ended sessions. Its score is a reward with `source = "judge:NAME"`."""

    kind: Literal["rubric"] = "rubric"
    """`rubric`: a score of one session by criteria."""
    model: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}/\S{1,200}$")]
    """`PROVIDER/MODEL`: a provider of the configuration (`[providers.NAME]`), and the model's name there."""
    rubric: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=20_000)]
    """The criteria, in words."""
    reward: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """The name of the reward; None: the judge's name."""
    low: RewardNumber = 0.0
    high: RewardNumber = 1.0
    """The worst and the best score. An answer outside of them is invalid."""
    votes: int = Field(default=1, ge=1, le=15)
    """Answers to ask for. The score is their median; more than half of them must be valid."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None: the provider's default."""
    max_tokens: PositiveInt = 1024
    """Longest answer, in tokens."""
    timeout_seconds: PositiveFloat = Field(default=60.0, le=300)
    """Longest time for one answer."""
    max_characters: int = Field(default=60_000, ge=1000, le=2_000_000)
    """A longer conversation is cut in its middle; the judge is shown where, and the judgement records it."""
    tokens_per_day: PositiveInt | None = None
    """Once the judge has used this many tokens in the last 24 hours, its jobs wait."""

    @model_validator(mode="after")
    def _has_a_range(self) -> JudgeSettings:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low}, not below high, which is {self.high}")
        return self

    @property
    def provider(self) -> str:
        return self.model.partition("/")[0]

    @property
    def provider_model(self) -> str:
        """The model's name at its provider."""
        return self.model.partition("/")[2]
