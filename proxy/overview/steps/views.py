"""Views of a training step. Later releases may add fields, but never rename or remove one."""

from __future__ import annotations

import msgspec

from proxy.contract.claim import TrajectoryAudit
from proxy.contract.policy import WeightsReference
from proxy.contract.step import StepInputs


class StepItem(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version and the step that made it; version 0 is the base model and has no step.

    From `weights_removed_at` on, its weight files may have been deleted to save space. `rejected_because` is the
    reason why a version in the state `rejected` or `rolled_back` is not served.
    """

    version: int
    parent_version: int | None
    state: str
    created_at: float
    served_at: float | None
    swap_seconds: float | None
    weights: WeightsReference | None
    trajectories: int
    trained_tokens: int
    reward_mean: float | None
    staleness_mean: float | None
    staleness_max: int | None
    metrics: dict[str, float | None]
    weights_removed_at: float | None = None
    rejected_because: str | None = None


class UsedReward(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger entry that a step trained on. `value_now` is the value that superseded it since, None if none has."""

    id: str
    turn_id: str | None
    name: str
    source: str
    value: float
    value_now: float | None


class StepTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a step: its audit, the rewards it was trained on, and its current reward.

    `kept`: its batch gave no gradient by itself and was consumed together with a later one. `group` is the group's
    name, `external_id` the client's name of the session. `sampled`: its tokens were stored.
    """

    audit: TrajectoryAudit
    reward_now: float | None
    revised: bool
    claim_id: str | None = None
    kept: bool = False
    group_id: str | None = None
    group: str | None = None
    task: str | None = None
    external_id: str | None = None
    sampled: bool = False
    rewards: tuple[UsedReward, ...] = ()


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """A step with its batch. `inputs` is None if the trainer did not report them."""

    step: StepItem
    run: str
    config_hash: str | None
    seed: int | None
    claim_ids: tuple[str, ...]
    trajectories: tuple[StepTrajectory, ...]
    rewards_revised: int
    inputs: StepInputs | None = None


class AuditedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A trained turn, token by token. `ratios` are the trainer's probabilities over the engine's. `output_ids` and
    `texts` are None if the turn was erased, `texts` also if the proxy cannot decode them."""

    session_id: str
    turn_id: str
    ordinal: int | None
    output_ids: tuple[int, ...] | None
    texts: tuple[str, ...] | None
    logprobs: tuple[float, ...]
    engine_logprobs: tuple[float, ...]
    ratios: tuple[float, ...]
    advantages: tuple[float, ...]
    staleness: tuple[int, ...]
    clipped: tuple[bool, ...]


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a step's sampled trajectories."""

    version: int
    turns: tuple[AuditedTurn, ...]


class StepPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of steps, newest first; the last page has no `next_cursor`."""

    steps: tuple[StepItem, ...]
    next_cursor: str | None
