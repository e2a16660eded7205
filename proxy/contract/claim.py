"""Claims: leases of trajectories to a trainer, which end in a commit, are released or expire. Bodies are
MessagePack."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from proxy.contract.exchange import Offer
from proxy.contract.identifiers import ClaimId, SessionId, TurnId
from proxy.contract.policy import Probe, WeightsReference
from proxy.contract.step import StepInputs, TokenAudit
from proxy.contract.trajectory import TrajectoryGroup

MEDIA_TYPE = "application/msgpack"

_Message = TypeVar("_Message")


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for about `want` trajectories, in whole groups.

    The proxy answers as soon as `want` are claimable. After `wait_s` seconds it answers with the claimable ones if
    they are `at_least` so many, otherwise with an empty batch. Trajectories with a token older than `max_staleness`
    versions are marked stale. `process` names the claiming process: after its death, another process may release its
    claims.
    """

    trainer: str
    process: str | None = None
    want: int
    at_least: int = 1
    max_staleness: int = 4
    wait_s: float = 0.0


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that a process of the proxy has run, and those in which it had a generation at the engine. Two
    readings of the same `process` give the share of time in which its calls kept the engine busy."""

    process: str
    seconds: float
    busy_seconds: float


class ClaimedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a claim. `claim_id` is None if there was nothing to claim.

    `base_version` is the run's head at the time of the claim. `engine` is the engine's reading at the time of the
    answer; None if the proxy measures none. `max_new_tokens` is the run's bound on one answer at that time; None from
    proxies that do not send it.
    """

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
    """A notice that a trainer's process has died or is about to end, so that its trajectories become claimable at
    once."""

    process: str


class ReleasedClaims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims that a request released."""

    claim_ids: tuple[ClaimId, ...]


class AnswerFault(StrEnum):
    """A property of an answer for which it is not trained.

    `length` and `interrupted`: it was cut. `sampling`: top-p, top-k or min-p cut the distribution that it was drawn
    from. `repetition` and `gibberish`: a filter caught it.
    """

    LENGTH = "length"
    INTERRUPTED = "interrupted"
    SAMPLING = "sampling"
    REPETITION = "repetition"
    GIBBERISH = "gibberish"


SUPERSEDED = "superseded"
"""The reason for not training an answer without a fault: the agent continued from another answer to the same prompt,
and this one has no reward of its own."""


class SkipReason(StrEnum):
    """The reason why a consumed trajectory was not trained."""

    STALE = "stale"
    NO_REWARD = "no_reward"
    NOTHING_TRAINABLE = "nothing_trainable"
    TRUNCATED = "truncated"
    SAMPLING = "sampling"
    REPETITION = "repetition"
    GIBBERISH = "gibberish"
    MALFORMED = "malformed"
    NO_SIGNAL = "no_signal"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    EXPLODED_GRADIENT = "exploded_gradient"
    FILTERED = "filtered"
    USER_FUNCTION_FAILED = "user_function_failed"


class MaskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the policy that was not trained. `reason` is an `AnswerFault`, `SUPERSEDED`, or a reason that a
    newer trainer introduced."""

    turn_id: TurnId
    reason: str


class TrajectoryAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one trajectory in a step. Ratios are the trainer's over the engine's probability, per trained
    token.

    A trajectory that was consumed without being trained has `trained_tokens` 0 and a `skipped` reason, a
    `SkipReason`. `masked` are its answers that were not trained; older trainers do not report them.
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
    """The record of one training step, stored with the version that it made. `tokens` are audits of a few of its
    trajectories; `inputs` are what a replay of the step needs."""

    config_hash: str
    seed: int
    metrics: dict[str, float]
    audit: tuple[TrajectoryAudit, ...]
    tokens: tuple[TokenAudit, ...] = ()
    inputs: StepInputs | None = None


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to publish a version and consume the claims' trajectories, in one transaction. A version that was
    fitted to chosen data (`StepInputs.fit`) has no claims. `probe` is None from trainers that do not compute it.

    If not `is_saved`, the weights are in shared memory (`contract.memory`), or their trainer sends them to engines by
    an `offer` (`contract.exchange`), and their directory does not exist yet. The version becomes the head and is
    served, and consumes its claims when the trainer reports that it is saved. Offered weights have no files, and
    their `sha256` is only a name until then.
    """

    claim_ids: tuple[ClaimId, ...]
    parent_version: int
    weights: WeightsReference
    step: StepReport
    probe: Probe | None = None
    is_saved: bool = True
    offer: Offer | None = None


class CommitReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a commit. `repeated`: this very commit was already made, and nothing changed. `engines` is the
    number of engines that are about to ask for an offered version."""

    version: int
    repeated: bool
    engines: int = 0


def encode(message: Any) -> bytes:
    """Encode a contract message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[_Message]) -> _Message:
    """Decode MessagePack to a contract message.

    Raise msgspec.DecodeError; for a well-formed body of the wrong shape its subclass msgspec.ValidationError.
    """
    return msgspec.msgpack.decode(body, type=kind)
