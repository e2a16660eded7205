"""Judges, which score sessions with a model, and the providers whose models they use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    """Where judges' models are. Only the installation's configuration has providers: a run, which its users may
    change, names one and sees neither its address nor its key."""

    base_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")] | None = None
    """The address of an OpenAI-compatible endpoint before `/chat/completions`, such as `https://api.openai.com/v1`.
    None: the provider is litellm's of this name (`anthropic`, `gemini`, …)."""
    api_base: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")] | None = None
    """The address of litellm's provider, instead of the one that litellm knows."""
    api_key: SecretStr | None = None
    """The key to send as a bearer token; None: none is sent."""
    structured: bool = True
    """Whether answers are requested as JSON of a schema (`response_format`). Switch it off for an endpoint that
    refuses that; answers are then read from the text."""
    prompt_price: NonNegativeFloat | None = None
    """Price of a million tokens of prompts, in any currency; None: the price that litellm knows for its own
    providers, in US dollars, and else unknown."""
    completion_price: NonNegativeFloat | None = None
    """Price of a million tokens of answers."""

    @model_validator(mode="after")
    def _has_both_prices(self) -> ProviderSettings:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("prompt_price and completion_price belong together: give both or neither")
        return self

    @model_validator(mode="after")
    def _has_one_address(self) -> ProviderSettings:
        if self.base_url is not None and self.api_base is not None:
            raise ValueError("api_base is for litellm's providers; one with a base_url has no use for it")
        return self


class JudgeKind(StrEnum):
    """How a judge comes to its scores (`proxy/judges/kinds`)."""

    RUBRIC = "rubric"
    RELATIVE = "relative"
    PAIRWISE = "pairwise"
    FOLLOW_UP = "follow_up"
    VERIFIER = "verifier"
    PYTHON = "python"

    @property
    def asks_a_model(self) -> bool:
        return self not in {JudgeKind.VERIFIER, JudgeKind.PYTHON}

    @property
    def can_compare(self) -> bool:
        """Whether the judge's model and criteria can choose between two answers to one prompt. A judge of the kind
        `follow_up` needs the message after an answer, which an answer that nobody saw does not have."""
        return self.asks_a_model and self is not JudgeKind.FOLLOW_UP


_PROVIDER = r"[a-z0-9][a-z0-9_-]{0,39}/\S{1,200}"
_RUN = r"run:[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[0-9]{1,9})?"


class JudgeSettings(Section):
    """A judge of a run's ended sessions. Its score is a reward with `source = "judge:NAME"`."""

    kind: JudgeKind = JudgeKind.RUBRIC
    """`rubric`: a score of one session by criteria. `relative`: scores of all sessions of a group, which the model
    sees together. `pairwise`: shares of won comparisons within a group. `follow_up`: a score of each answer by the
    message that followed it. `verifier`: rewards from an HTTP service. `python`: rewards from a function."""
    model: Annotated[str, StringConstraints(pattern=rf"^({_PROVIDER}|{_RUN})$")] | None = None
    """`PROVIDER/MODEL`: a provider of the configuration (`[providers.NAME]`), and the model's name there. `run:NAME`
    or `run:NAME@VERSION`: another run of the same project, which the proxy's engines serve."""
    rubric: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=20_000)] | None = None
    """The criteria, in words. Kinds other than `rubric` have general ones of their own."""
    prompt: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """A file NAME.jinja of `[judging] prompts_dir` to use instead of the shipped prompt."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://\S{1,2000}$")] | None = None
    """The address of a `verifier`."""
    function: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}:[A-Za-z_][A-Za-z0-9_]{0,99}$")]
        | None
    ) = None
    """The function of a `python` judge, `MODULE:NAME`; the module is one of `[judging] python_modules`."""
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
    """A longer conversation is cut in its middle; the judge is shown where, and the judgement records it. Of several
    conversations in one prompt, each has its share."""
    tokens_per_day: PositiveInt | None = None
    """Once the judge has used this many tokens in the last 24 hours, its jobs wait."""

    @model_validator(mode="after")
    def _has_a_range(self) -> JudgeSettings:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low}, not below high, which is {self.high}")
        return self

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> JudgeSettings:
        """Refuse settings that are missing or that the kind would ignore."""
        needed = {"verifier": "url", "python": "function"}.get(self.kind, "model")
        if getattr(self, needed) is None:
            raise ValueError(f"{needed}: a judge of the kind {self.kind} needs it")
        if self.kind is JudgeKind.RUBRIC and self.rubric is None:
            raise ValueError("rubric: a judge of the kind rubric needs it")
        foreign = {"url", "function"} - {needed}
        if not self.kind.asks_a_model:
            foreign |= _FOR_MODELS
        unused = sorted(
            name for name in foreign if getattr(self, name) != type(self).model_fields[name].get_default()
        )
        if unused:
            raise ValueError(f"{', '.join(unused)}: a judge of the kind {self.kind} has no use for it")
        return self

    @property
    def run_model(self) -> str | None:
        """The run that is asked, `NAME` or `NAME@VERSION`; None for a provider's model and a kind without a model."""
        return None if self.model is None or not self.model.startswith("run:") else self.model.removeprefix("run:")

    @property
    def provider(self) -> str | None:
        """The provider's name; None for a run and for a kind without a model."""
        return None if self.model is None or self.run_model is not None else self.model.partition("/")[0]

    @property
    def provider_model(self) -> str:
        """The model's name at its provider."""
        return (self.model or "").partition("/")[2]


_FOR_MODELS = {
    "model", "rubric", "prompt", "votes", "temperature", "max_tokens", "max_characters", "tokens_per_day"
}  # fmt: skip


class JudgingSettings(Section):
    """What judges may use of this installation."""

    prompts_dir: Path | None = None
    """The directory of prompts that judges name. Each worker needs the same files."""
    busy_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Runs answer judges while calls hold at most this share of the engine's slots; 0: while the engine has no
    calls."""
    python_modules: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")], ...] = ()
    """Modules whose functions `python` judges may call."""
    python_in_proxy: bool = False
    """Whether the proxy runs `python` judges itself, without `base-rl worker`. A function that computes for long, or
    that ends the process, then delays or ends the calls of agents."""
