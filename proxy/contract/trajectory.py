"""A session in the trainer's form: its token tree and its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property

import msgspec

from proxy.contract.arrays import count_ids, count_logprobs, unpack_ids, unpack_logprobs
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.turn import Cut, FinishReason, LogprobConvention, TurnState, VersionSpan, cut_of


class Purpose(StrEnum):
    """The purpose of a session. `eval` sessions are recorded and scored, never trained."""

    TRAIN = "train"
    EVAL = "eval"


class Feedback(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A text about the session, or about its turn `turn_id`."""

    turn_id: TurnId | None
    text: str
    source: str


class TrajectoryTurn(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A node of the token tree. `parent` is an index into `Trajectory.turns`, always smaller than the node's own.

    - The prompt is the first `prefix_tokens` ids of the parent's path followed by `prompt_ids`. `logprobs` belong to
      `output_ids` one to one, at `temperature`. These three are sent packed (`contract.arrays`), as stored, and
      unpacked at the first access; construction raises ValueError for bytes that are not packed values.
    - `trainable` is false for greedy, failed and abandoned turns.
    - `masked` are redacted spans, [start, end) over `prompt_ids` followed by `output_ids`. The placeholders in them
    are not trained. - `finish_reason` is None from a proxy that does not send it yet; `state` is unknown then too. -
    `superseded`: the agent continued from another answer to the same prompt (`contract.choices`), so that no reward
    of the session is about this answer.
    - `hints` are pairs of a place in the turn's whole prompt and an index into `Trajectory.hints`, whose tokens a
    teacher reads there.
    """

    id: TurnId
    parent: int | None
    prefix_tokens: int
    packed_prompt_ids: bytes
    packed_output_ids: bytes
    packed_logprobs: bytes
    spans: tuple[VersionSpan, ...]
    temperature: float
    convention: LogprobConvention
    trainable: bool
    reward: float | None = None
    masked: tuple[tuple[int, int], ...] = ()
    finish_reason: FinishReason | None = None
    state: TurnState = TurnState.COMPLETE
    superseded: bool = False
    hints: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        count_ids(self.packed_prompt_ids)
        count_ids(self.packed_output_ids)
        count_logprobs(self.packed_logprobs)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed_prompt_ids)

    @cached_property
    def output_ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed_output_ids)

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        return unpack_logprobs(self.packed_logprobs)

    @property
    def cut(self) -> Cut | None:
        """The reason why the answer was cut; None for a complete answer, and if the finish reason is unknown."""
        return cut_of(self.finish_reason, self.state)

    @property
    def learnt(self) -> Sequence[int]:
        """Positions in `output_ids` of the tokens that were not redacted."""
        if not self.masked:
            return range(len(self.output_ids))
        before = len(self.prompt_ids)
        hidden = {position - before for start, end in self.masked for position in range(start, end)}
        return [position for position in range(len(self.output_ids)) if position not in hidden]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A session to train. `reward` combines the session's entries; None if only turns were rewarded, or if only texts
    are about it.

    `feedback` are the texts in order of arrival. `hints` are the messages made of them, as packed ids.
    `first_message` is equal for sessions whose first message of a user is the same; None without one.
    """

    session_id: SessionId
    group_id: GroupId | None
    task: str | None
    turns: tuple[TrajectoryTurn, ...]
    reward: float | None
    feedback: tuple[Feedback, ...] = ()
    hints: tuple[bytes, ...] = ()
    first_message: bytes | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that produced one of its tokens; None for a trajectory without tokens."""
        return min((span.version for turn in self.turns for span in turn.spans), default=None)


class TrajectoryGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that attempt the same task. `id` is None for a session that belongs to no group."""

    id: GroupId | None
    trajectories: tuple[Trajectory, ...]
