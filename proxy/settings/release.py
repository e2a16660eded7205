"""How a version comes to be served, and what takes it back: gates, shadow, canary, and automatic rollback."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from proxy.settings.judges import JudgeName
from proxy.settings.section import Section

ReleasePolicy = Literal["immediate", "gated", "manual"]
Verdict = Literal["promote", "reject"]

SuiteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Bound = Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class BoundSettings(Section):
    """Bounds on metrics of the step that made a version. None: no bound. A version whose step did not report a
    bounded metric is rejected."""

    kl_behaviour_max: Finite | None = None
    kl_reference_max: Finite | None = None
    entropy_min: Finite | None = None
    entropy_max: Finite | None = None

    @property
    def are_on(self) -> bool:
        return any(value is not None for value in self.model_dump().values())


class EvaluationSettings(Section):
    """An evaluation on fixed tasks, whose results anybody posts (`base-rl eval`)."""

    suite: SuiteName | None = None
    """The name of the results to wait for; None: no evaluation is needed."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://\S{1,2000}$")] | None = None
    """The address of an evaluator, which is asked for the results of each version that is compared. None: somebody
    posts them."""
    tasks: PositiveInt = 20
    """Tasks that must have results of both the candidate and the serving version."""
    max_drop: Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)] = 0.0
    """The candidate fails if its mean reward on the same tasks is lower by more than this, and is lower at all beyond
    chance."""

    @model_validator(mode="after")
    def _has_a_suite(self) -> EvaluationSettings:
        if self.url is not None and self.suite is None:
            raise ValueError("url: the evaluator is asked for a suite: set evaluation.suite as well")
        return self


class ReleaseShadowSettings(Section):
    """A share of calls whose prompts the candidate answers too. No caller sees its answers, and none is trained."""

    share: Share = 0.0
    """0: no shadow."""
    answers: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Pairs of answers, the candidate's and the serving version's, that the comparison needs."""
    busy_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The candidate answers while calls hold at most this share of its engine's slots; 0: while there are none."""
    wait_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """A prompt for which no slot is free for so long is dropped. A candidate that generates for longer without an end
    has failed to answer."""


class PreferenceSettings(Section):
    """A judge's choice between the two answers of each of the shadow's pairs."""

    judge: JudgeName | None = None
    """One of the run's judges that asks a model; None: no judge is asked."""
    max_loss: Annotated[float, Field(gt=0.0, le=0.5)] = 0.1
    """The candidate passes early once its share of wins is surely not below one half by more than this."""
    undecided: Verdict = "promote"
    """The decision after `shadow.answers` pairs if the test cannot tell."""


class CanarySettings(Section):
    """A share of new sessions that the candidate answers, compared with the others."""

    share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """0: no canary."""
    sessions: PositiveInt = 200
    """Rewarded canary sessions after which `undecided` applies if the test cannot tell."""
    max_drop: Bound = 0.1
    """The candidate passes early once its mean reward is surely not lower by more than this."""
    undecided: Verdict = "promote"


class GuardSettings(Section):
    """Rises in what a reward may hide, beyond which a version is refused. A value of a session is a mean over its
    calls. None: not guarded."""

    failed_calls: Share | None = 0.1
    """Share of calls that failed."""
    broken_tool_calls: Share | None = 0.2
    """Share of answers with a tool call that cannot be read."""
    cut_answers: Share | None = 0.2
    """Share of answers that reached their bound on tokens."""
    answer_length: Share | None = None
    """Tokens of an answer, as a share of `max_new_tokens`."""
    refusals: Share | None = None
    """Share of answers that contain one of `refusal_texts`, or end by a content filter."""
    slow_calls: Share | None = None
    """Share of calls that took longer than `slow_seconds`."""
    slow_seconds: PositiveFloat = 30.0
    refusal_texts: Annotated[str, StringConstraints(min_length=3, max_length=2000)] = (
        "I cannot help; I can't help; I cannot assist; I can't assist; I'm unable to help"
    )
    """Texts separated by `;`, in any case."""


class RollbackSettings(Section):
    """Automatic rollback of a version that serves."""

    max_drop: Bound | None = None
    """Roll back once the mean reward is surely lower than before by more than this. None: no automatic rollback."""
    predecessors: Annotated[int, Field(ge=1, le=50)] = 16
    """Versions before the suspected one whose sessions it is compared with."""
    window: Annotated[int, Field(ge=1, le=50)] = 12
    """Newest served versions that are suspected; each together with those after it."""
    versions: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Consecutive versions to which `release.error_rate` applies: the probability that any of them is taken back
    wrongly. Each version's test gets an equal part."""
    leave_out_sessions: bool = True
    """Whether untrained sessions of the versions rolled back are left out of training."""


class ReleaseSettings(Section):
    """How a version of the run comes to be served."""

    policy: ReleasePolicy = "immediate"
    """`immediate`: at once. `gated`: after the gates below. `manual`: when somebody promotes it."""
    train_from: Literal["newest", "passed"] = "newest"
    """`newest`: the trainer goes on while a candidate waits. `passed`: it gets no trajectories until then."""
    error_rate: Annotated[float, Field(ge=1e-6, le=0.5)] = 0.05
    """Probability of a wrong conclusion, however often the tests look: of each gate about a candidate, and of the
    automatic rollback in `rollback.versions` versions together."""
    reward_low: Finite = 0.0
    reward_high: Finite = 1.0
    """Rewards are clipped to this range for the tests, which need bounded values."""
    timeout_seconds: PositiveFloat = 86400.0
    """Longest time for which a candidate waits for its gates."""
    on_timeout: Verdict = "reject"
    bounds: BoundSettings = BoundSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    shadow: ReleaseShadowSettings = ReleaseShadowSettings()
    preference: PreferenceSettings = PreferenceSettings()
    canary: CanarySettings = CanarySettings()
    guards: GuardSettings = GuardSettings()
    rollback: RollbackSettings = RollbackSettings()

    @model_validator(mode="after")
    def _consistent(self) -> ReleaseSettings:
        if self.reward_low >= self.reward_high:
            raise ValueError("reward_low must be less than reward_high")
        if self.preference.judge is not None and not self.shadow.share:
            raise ValueError(
                "preference.judge: the judge compares the answers that the shadow collects: set shadow.share as well"
            )
        trials = self.canary.share > 0 or self.shadow.share > 0
        has_gate = self.bounds.are_on or self.evaluation.suite is not None or trials
        if self.policy == "gated" and not has_gate:
            raise ValueError(
                "policy = 'gated' needs a gate: set canary.share, shadow.share, evaluation.suite or one of bounds, or"
                " use policy = 'manual'"
            )
        return self

    @property
    def trials(self) -> list[str]:
        """The settings by which a candidate answers calls or their prompts while another version serves. A run of
        whole weights needs a second engine for them."""
        shares = {"canary.share": self.canary.share, "shadow.share": self.shadow.share}
        return [name for name, share in shares.items() if share > 0] if self.policy == "gated" else []
