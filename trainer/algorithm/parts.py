"""The parts of a policy-gradient algorithm, and their form in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from trainer.algorithm.objective import Objective
from trainer.config import (
    Baseline,
    Correction,
    Denominator,
    Divergence,
    FilterSettings,
    Proximal,
    RewardSettings,
    Scale,
    Surrogate,
    TaskBy,
    Truncated,
    TruncatedSampling,
)
from trainer.errors import ConfigurationError
from trainer.user_code import UserFunction, functions_in, without_directories

_NO_FILTERS = FilterSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The parts of a policy-gradient algorithm; None switches an optional part off.

    A part added after the first release has a default that leaves older algorithms unchanged, because `from_json`
    reads what older trainers wrote.

    - `loss`, `advantage` and `filter` are functions of the user's own (`algorithm/custom.py`). `loss` takes the
      place of the surrogate, `advantage` that of baseline, scale and discounts; `filter` drops trajectories before.
    - `surrogate`, `clip_low`, `clip_high`, `dual_clip`, `gate_positive` and `gate_negative` are the policy loss
      (`algorithm/losses.py`).
    - `correction`, `correction_low`, `correction_high`, `veto` and `importance_cap` are the weight of a token for the
      difference between the proximal and the behaviour policy (`algorithm/correction.py`).
    - `proximal` is the policy in the denominator of the ratio. `second_moment` bounds the mean square of
      log(policy / behaviour) over the tokens that have moved in the direction of their advantage: those with the
      largest squares are left out until it holds.
    - `denominator` is what the summed loss is divided by; `constant_tokens` is the answer length of the constant
      denominator. With `drop_degenerate`, trajectories without an advantage do not count in it.
    - With `fill`, groups without an advantage are left out of the batch, and the trainer claims more in their place
      (`trainer/claims/filling.py`).
    - `mini_batches` is the number of optimiser steps per batch.
    - `kl_coefficient` weighs the divergence from the base model. `kl_form` k1 subtracts it from the advantages, for
      each token together with the tokens after it in its answer; k2 and k3 add it to the loss.
    - `entropy_coefficient` × the policy's entropy is subtracted from the loss. `top_entropy_share` is the share of
      the batch's tokens, those of the highest entropy, that the policy loss is summed over (`algorithm/entropy.py`).
    - `router_aux_coefficient` weighs the load-balancing loss of a mixture's routers (`models/archon/moe.py`).
    - With a teacher, the loss is `rl_coefficient` × the above + `distill_coefficient` × the divergence from the
      teacher (`algorithm/imitation.py`).
    - `hindsight_coefficient` × clip(teacher − policy, ±`hindsight_clip`) is added to the advantage of each
      token of an answer with feedback in words. The teacher is the reference that has read the feedback
      (`batching/hindsight.py`). Answers whose mean |teacher − policy| is below `hindsight_floor` get nothing.
    - `turn_discount` applies per turn between a turn and the end of its path, `running_mean_decay` per trajectory.
      `task_by` says which sessions share the running estimates of a task (`algorithm/running.py`).
    - With a critic, `gae_lambda` and `discount` apply per token (`algorithm/gae.py`). `value_clip` bounds how far its
      values may move from those at the start of the step. Its learning rate is `critic_rate` × the policy's. In its
      first `critic_warmup` steps only the critic is trained.
    - A session whose longest answer has more than `overlong_tokens` − `overlong_tail` tokens loses reward, up to
      `overlong_factor`. None: they follow the run's bound on answers (`algorithm/overlong.py`).
    - `truncated` is what happens to answers that were cut, `truncated_sampling` to those drawn with top-p, top-k or
      min-p, `filters` to repetitive ones and gibberish (`batching/answers.py`).
    """

    loss: UserFunction | None = None
    advantage: UserFunction | None = None
    filter: UserFunction | None = None
    surrogate: Surrogate = Surrogate.CLIP
    baseline: Baseline
    scale: Scale
    clip_low: float
    clip_high: float
    dual_clip: float | None
    gate_positive: float = 1.0
    gate_negative: float = 1.05
    importance_cap: float
    correction: Correction = Correction.TRUNCATE
    correction_low: float | None = None
    correction_high: float | None = None
    veto: float | None = None
    proximal: Proximal
    second_moment: float | None = None
    denominator: Denominator
    constant_tokens: int = 1024
    drop_degenerate: bool = False
    fill: bool = False
    mini_batches: int = 1
    kl_coefficient: float = 0.0
    kl_form: Divergence = Divergence.K3
    entropy_coefficient: float = 0.0
    router_aux_coefficient: float = 0.0
    top_entropy_share: float = 1.0
    rl_coefficient: float = 1.0
    distill_coefficient: float = 0.0
    hindsight_coefficient: float = 0.0
    hindsight_clip: float = 5.0
    hindsight_floor: float = 0.0
    turn_discount: float
    gae_lambda: float = 1.0
    discount: float = 1.0
    value_clip: float | None = None
    critic_rate: float = 1.0
    critic_warmup: int = 0
    running_mean_decay: float
    task_by: TaskBy = TaskBy.NAME
    overlong_factor: float = 0.0
    overlong_tokens: int | None = None
    overlong_tail: int | None = None
    truncated: Truncated = Truncated.TRAIN
    truncated_sampling: TruncatedSampling = TruncatedSampling.TRAIN
    reward: RewardSettings
    filters: FilterSettings = _NO_FILTERS

    @property
    def objective(self) -> Objective:
        return Objective(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Objective)})

    @property
    def looks_first(self) -> bool:
        """Whether the whole batch is scored under the weights at the start of the step, before the first gradient."""
        return (
            self.mini_batches > 1
            or self.second_moment is not None
            or self.top_entropy_share < 1
            or self.whitens
            or self.learns_from_words
            or (self.has_critic and self.pays_divergence_in_reward)
        )

    @property
    def user_functions(self) -> dict[str, UserFunction]:
        """The user's own functions, by name of the part."""
        return functions_in(self)

    @property
    def whitens(self) -> bool:
        """Whether advantages are normalised over the tokens of the batch."""
        return self.scale is Scale.TOKEN_STD and self.advantage is None

    @property
    def ratio_is_one(self) -> bool:
        """Whether every ratio is exactly 1, because the denominator has the weights of the only optimiser step."""
        return self.mini_batches == 1 and self.proximal is Proximal.RECOMPUTE

    @property
    def has_critic(self) -> bool:
        return self.baseline is Baseline.CRITIC

    @property
    def has_divergence(self) -> bool:
        """Whether the divergence from the reference is learnt from."""
        return self.kl_coefficient > 0

    @property
    def has_reference(self) -> bool:
        return self.has_divergence or self.learns_from_words

    @property
    def has_teacher(self) -> bool:
        return self.distill_coefficient > 0

    @property
    def learns_from_words(self) -> bool:
        return self.hindsight_coefficient > 0

    @property
    def learns_from_rewards(self) -> bool:
        return self.rl_coefficient > 0

    @property
    def pays_divergence_in_reward(self) -> bool:
        return self.has_divergence and self.kl_form is Divergence.K1

    def learns_from(self, advantages: Iterable[float]) -> bool:
        """Whether a sequence whose answers have these advantages has a gradient."""
        # A user's loss may have a gradient without an advantage.
        also = self.has_divergence or self.entropy_coefficient > 0 or self.loss is not None
        held = also and not self.drop_degenerate
        return self.has_critic or self.has_teacher or self.whitens or held or any(advantages)


_PARTS: TypeAdapter[Algorithm] = TypeAdapter(Algorithm)


def as_json(algorithm: Algorithm) -> dict[str, Any]:
    """Return the parts by name, as JSON values."""
    return without_directories(cast("dict[str, Any]", _PARTS.dump_python(algorithm, mode="json")))


def from_json(parts: Mapping[str, Any]) -> Algorithm:
    """Read the result of `as_json`. Raises ConfigurationError for parts that this version does not know."""
    try:
        return _PARTS.validate_python(parts)
    except ValidationError as error:
        raise ConfigurationError(f"this version does not know these parts of an algorithm: {error}") from error
