"""One run: its model, its sampling, its limits, and how its sessions end."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

import msgspec
from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from proxy.contract.reward import RewardRules
from proxy.settings.content import RedactionSettings, RetentionSettings
from proxy.settings.judges import JudgeName, JudgeSettings
from proxy.settings.limits import LimitSettings
from proxy.settings.projects import ProjectName
from proxy.settings.release import ReleaseSettings
from proxy.settings.rewards import RewardNumber, RewardSettings
from proxy.settings.section import Section
from proxy.settings.shadow import ShadowSettings
from proxy.settings.texts import TextSettings


class SamplingMode(StrEnum):
    """How the sampling that agents ask for is changed in training sessions."""

    RESPECT = "respect"
    RAISE_GREEDY = "raise_greedy"
    OVERRIDE = "override"


class SamplingSettings(Section):
    mode: SamplingMode = SamplingMode.RAISE_GREEDY
    temperature: PositiveFloat = 1.0


ReasoningParserName = Literal["auto", "none", "think"]
ImageMode = Literal["refuse", "name"]


class RunSettings(Section):
    """One policy being trained."""

    name: str = Field(default="policy", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    model: str = ""
    """Directory or Hugging Face id of the base model, which is version 0."""
    project: ProjectName | None = Field(default=None, exclude=True)
    """The project that the run belongs to, which is made if it does not exist. Without one, a new run goes into the
    project `default`, and a run that exists stays where it is."""
    weights: Literal["full", "adapter"] = "full"
    """The kind of the run's versions. `full`: whole weights, or adapters that engines merge. `adapter`: each version
    is a LoRA adapter, which an engine holds beside those of other runs over one base model."""
    begin_from: str | None = Field(default=None, alias="from", min_length=3, max_length=80)
    """The version of another run, such as `shop@12`, whose weights are version 0 of this one; only read when the run
    is created. It is no setting of the run and not stored with them."""
    sampling: SamplingSettings = SamplingSettings()
    max_new_tokens: PositiveInt = 1024
    """Bound on one answer where the client asks for none or for more."""
    tool_parser: str = "auto"
    """How the model writes tool calls; `auto`: as its chat template does. `none`: they stay text."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model marks its reasoning before an answer; `think`: between `<think>` and `</think>`."""
    allow_control_tokens: bool = False
    """Whether texts of clients, tools and answers may contain control tokens of the model, such as `<|im_end|>`.
    False: they are tokenised as plain text, so that only the chat template begins and ends turns."""
    images: ImageMode = "refuse"
    """Models read text only. `refuse`: a call with an image is a 400; `name`: the model reads "[image]" in its
    place, and the answer's `x-base-rl-warning` says so."""
    repeated_names: Literal["next_attempt", "refuse"] = "next_attempt"
    """How a new conversation under the name of an ended session is answered. `next_attempt`: it opens the next
    attempt of that name; `refuse`: with a 410. Names that outlive an attempt, as a project's do, always continue."""
    session_idle_seconds: PositiveFloat = 900.0
    """An open session without a call for this long ends."""
    reward_timeout_seconds: PositiveFloat = 86400.0
    """An ended session without a reward for this long expires: it will not be trained."""
    group_timeout_seconds: PositiveFloat = 60.0
    """A group still incomplete this long after its first end is trained with what it has (two at least)."""
    lease_seconds: PositiveFloat = 120.0
    """A claim whose trainer does not renew it for this long returns its trajectories."""
    reward_weights: dict[str, RewardNumber] = Field(default_factory=dict)
    """Weight per reward name in the combined reward; names not listed weigh 1."""
    rewards: RewardSettings = RewardSettings()
    texts: TextSettings = TextSettings()
    shadow: ShadowSettings = ShadowSettings()
    judges: dict[JudgeName, JudgeSettings] = Field(default_factory=dict, max_length=20)
    """Judges by name. Each scores every session that ends, in a background job."""
    release: ReleaseSettings = ReleaseSettings()
    retention: RetentionSettings = RetentionSettings()
    redaction: RedactionSettings = RedactionSettings()
    limits: LimitSettings = LimitSettings()
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Settings of the trainer for this run, which the trainer reads from the proxy and checks."""

    @field_validator("trainer")
    @classmethod
    def _can_be_sent(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Raise ValueError for values that neither the store nor the trainer's wire format can hold."""
        try:
            json.dumps(value, allow_nan=False)
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"use tables, lists, texts, finite numbers and booleans only ({error})") from error
        return value

    @field_validator("judges")
    @classmethod
    def _are_other_runs(cls, value: dict[str, JudgeSettings], given: ValidationInfo) -> dict[str, JudgeSettings]:
        """Raise ValueError for a judge that asks the run itself: the policy would learn to please itself."""
        for name, judge in value.items():
            if judge.run_model is not None and judge.run_model.partition("@")[0] == given.data.get("name"):
                raise ValueError(
                    f"{name}.model is the run that it judges ({judge.model}): name another run, for example one of "
                    "the same base model that is not trained"
                )
        return value

    @model_validator(mode="after")
    def _has_the_judge_of_its_gate(self) -> RunSettings:
        """Raise ValueError for a gate that names a judge which the run lacks, or which cannot compare answers."""
        name = self.release.preference.judge
        if name is None:
            return self
        able = ", ".join(each for each, judge in self.judges.items() if judge.kind.can_compare) or "none"
        if name not in self.judges:
            raise ValueError(
                f"release.preference.judge: the run has no judge {name!r}: add [run.judges.{name}] with a model, or"
                f" name one that it has (able to compare answers: {able})"
            )
        if not self.judges[name].kind.can_compare:
            raise ValueError(
                f"release.preference.judge: a judge of the kind {self.judges[name].kind} cannot compare two answers:"
                f" name one of the kind rubric, relative or pairwise (able: {able})"
            )
        return self

    @property
    def stored(self) -> dict[str, Any]:
        """The settings as the run's row has them."""
        return self.model_dump(mode="json", exclude={"begin_from"})

    @property
    def reward_rules(self) -> RewardRules:
        return RewardRules(
            weights=self.reward_weights,
            combine=self.rewards.combine,
            sources=self.rewards.sources,
            order=self.rewards.order,
            low=self.rewards.low,
            high=self.rewards.high,
            texts_train=self.texts.train,
            required=self.rewards.required,
        )
