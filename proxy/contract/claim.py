"""Claims: leases of trajectories to a trainer, which end in a commit or expire. Bodies are MessagePack."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from proxy.contract.identifiers import ClaimId, SessionId, TurnId
from proxy.contract.policy import WeightsReference
from proxy.contract.step import StepInputs, TokenAudit
from proxy.contract.trajectory import TrajectoryGroup

MEDIA_TYPE = "application/msgpack"

_Message = TypeVar("_Message")


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for about `want` trajectories, in whole groups.

    The answer comes as soon as `want` are there. After `wait_s` seconds it holds what is there, if that is `at_least`
    many, or an empty batch. Trajectories with a token older than `max_staleness` versions are marked stale.
    `process` names the claiming process: when it has died, another may give back what it held.
    """

    trainer: str
    process: str | None = None
    want: int
    at_least: int = 1
    max_staleness: int = 4
    wait_s: float = 0.0


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a process of the proxy has run, and how much of it a generation was at the engine. Two readings
    of the same `process` say how busy the engine was in between, with the calls of that process."""

    process: str
    seconds: float
    busy_seconds: float


class ClaimedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`claim_id` None: there was nothing to claim. `base_version` is the head at the time of the claim. `engine` is
    as of the answer; None where nobody looks at one. `max_new_tokens` is the run's bound on one answer at that time;
    None: the proxy does not say."""

    claim_id: ClaimId | None
    lease_expires_at: float
    base_version: int
    groups: tuple[TrajectoryGroup, ...]
    engine: EngineReading | None = None
    max_new_tokens: int | None = None

    @property
    def trajectory_count(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a heartbeat."""

    claim_id: ClaimId
    lease_expires_at: float


class AbandonedProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A notice that a trainer's process is dead or ends, so that what it claimed is claimable at once."""

    process: str


class ReleasedClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims that were leased and are not any more."""

    claim_ids: tuple[ClaimId, ...]


class MaskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was not trained although it was drawn from the policy, and the reason.

    The trainer's reasons are `length` and `interrupted` (the answer was cut), `sampling` (top-p, top-k or min-p cut
    the distribution that it was drawn from), `repetition` and `gibberish` (a filter caught it), `superseded` (the
    agent went on with another answer to the same prompt, and this one has no reward of its own).
    """

    turn_id: TurnId
    reason: str


class TrajectoryAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one trajectory in a step. Ratios are train over engine probability per trained token.

    `trained_tokens` 0 with a `skipped` reason: the trajectory was consumed and taught nothing. `masked` are the
    answers that were left out of it; audits of older trainers have none.
    """

    session_id: SessionId
    reward: float
    advantage: float
    trained_tokens: int
    staleness_mean: float
    staleness_max: int
    logprob_gap_mean: float
    logprob_gap_max: float
    ratio_min: float
    ratio_median: float
    ratio_max: float
    clipped_share: float
    skipped: str | None = None
    ratio_p05: float | None = None
    ratio_p95: float | None = None
    masked: tuple[MaskedTurn, ...] = ()


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one training step, kept with the version that it made. `tokens` are of a few of its trajectories;
    `inputs` is what replaying the step needs."""

    config_hash: str
    seed: int
    metrics: dict[str, float]
    audit: tuple[TrajectoryAudit, ...]
    tokens: tuple[TokenAudit, ...] = ()
    inputs: StepInputs | None = None


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publishes a version and consumes the claims' trajectories, in one transaction. There are none where the step's
    inputs say what it was fitted to instead."""

    claim_ids: tuple[ClaimId, ...]
    parent_version: int
    weights: WeightsReference
    step: StepReport


class CommitReply(msgspec.Struct, frozen=True, kw_only=True):
    """`repeated`: this very commit had been made before; nothing changed."""

    version: int
    repeated: bool


def encode(message: Any) -> bytes:
    """Encode a contract message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[_Message]) -> _Message:
    """Decode MessagePack to a contract message.

    Raises msgspec.DecodeError (msgspec.ValidationError for a well-formed body of the wrong shape).
    """
    return msgspec.msgpack.decode(body, type=kind)
