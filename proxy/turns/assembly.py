"""Assembly of turns into token trees, and of paths from trees. Pure.

A turn stores only what it adds: its full prompt is the first `prefix_tokens` ids of its parent's path, then its own
`prompt_ids`; its path is that prompt, then its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from proxy.contract.arrays import count_ids
from proxy.contract.choices import Asked, Prompt, superseded_turns
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import (
    Continuation,
    FinishReason,
    SamplingParameters,
    Turn,
    TurnPlace,
    TurnState,
    VersionSpan,
    abandoned_turns,
)


class BrokenTree(Exception):
    """Turns do not form a tree: a parent is missing, or is shorter than the prefix that its child shares with it."""


class PathPiece(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that one turn adds to a path."""

    id: str
    parent_id: str | None
    prefix_tokens: int
    prompt_ids: TokenIds
    output_ids: TokenIds
    redacted: bool = False


class Lineage(msgspec.Struct, frozen=True):
    """A turn and its ancestors. `start` is the number of tokens shared with the parent; the turn's own follow."""

    id: str
    start: int
    parent: Lineage | None

    def owner(self, tokens: int) -> str:
        """Return the turn to whose own tokens the last of the path's first `tokens` belongs."""
        found = self
        while found.parent is not None and tokens <= found.start:
            found = found.parent
        return found.id


def lineage_of(turn_id: str, pieces: Mapping[str, PathPiece]) -> Lineage:
    """Return the turn with its ancestors. Raise BrokenTree."""
    lineage: Lineage | None = None
    for piece in _ancestry(turn_id, pieces):
        lineage = Lineage(piece.id, piece.prefix_tokens, lineage)
    assert lineage is not None  # the turn itself
    return lineage


def is_redacted(turn_id: str, pieces: Mapping[str, PathPiece]) -> bool:
    """Return whether a turn on the path is redacted. Raise BrokenTree."""
    return any(piece.redacted for piece in _ancestry(turn_id, pieces))


def extend_path(parent_path: TokenIds, piece: PathPiece) -> TokenIds:
    """Return the path up to and including `piece`. Raise BrokenTree."""
    if piece.prefix_tokens > len(parent_path):
        raise BrokenTree(f"turn {piece.id} shares {piece.prefix_tokens} tokens with a path of {len(parent_path)}")
    return parent_path[: piece.prefix_tokens] + piece.prompt_ids + piece.output_ids


def path_of(turn_id: str, pieces: Mapping[str, PathPiece]) -> TokenIds:
    """Return the path from the root to the end of the turn's output. Raise BrokenTree."""
    path = TokenIds()
    for piece in _ancestry(turn_id, pieces):
        path = extend_path(path, piece)
    return path


def _ancestry(turn_id: str, pieces: Mapping[str, PathPiece]) -> list[PathPiece]:
    """Return the pieces of the path from the root to the turn."""
    chain: list[PathPiece] = []
    step: str | None = turn_id
    while step is not None:
        piece = pieces.get(step)
        if piece is None:
            raise BrokenTree(f"turn {step} is missing on the path to {turn_id}")
        chain.append(piece)
        step = piece.parent_id
    return chain[::-1]


# gc=False: a large claim loads tens of thousands of turns, which have no reference cycles.
class StoredTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The columns of a turn that a trajectory needs, with arrays packed as in the store (`contract.arrays`)."""

    id: TurnId
    parent_id: TurnId | None
    prefix_tokens: int
    prompt_ids: bytes
    output_ids: bytes
    output_logprobs: bytes
    spans: tuple[VersionSpan, ...]
    sampling: SamplingParameters
    state: TurnState
    finish_reason: FinishReason
    continuation: Continuation
    started_at: float
    finished_at: float
    masked: tuple[tuple[int, int], ...] = ()


def is_trainable(turn: Turn | StoredTurn) -> bool:
    """Return whether the turn's tokens were sampled from the policy: greedy and failed ones were not."""
    return turn.state is not TurnState.FAILED and bool(turn.output_ids) and not turn.sampling.is_greedy


def trainable_turns(turns: Sequence[Turn] | Sequence[StoredTurn]) -> frozenset[TurnId]:
    """Return the turns of one session that can be trained: sampled from the policy and not abandoned by the agent.

    `proxy.lifecycle.trainable` is the same rule as a query.
    """
    abandoned = abandoned_turns(
        TurnPlace(turn.id, turn.parent_id, turn.prefix_tokens, turn.prefix_tokens + _prompt_length(turn), turn.state)
        for turn in turns
    )
    return frozenset(turn.id for turn in turns if is_trainable(turn) and turn.id not in abandoned)


def _prompt_length(turn: Turn | StoredTurn) -> int:
    return count_ids(turn.prompt_ids) if isinstance(turn, StoredTurn) else len(turn.prompt_ids)


def _superseded(turns: Sequence[StoredTurn]) -> frozenset[str]:
    """Return the superseded turns of a session. `turns` must contain all parents."""
    places = {turn.id: place for place, turn in enumerate(turns)}
    return superseded_turns(
        [
            Asked(
                turn.id,
                Prompt(
                    None if turn.parent_id is None else places[turn.parent_id],
                    turn.prefix_tokens,
                    turn.prefix_tokens + _prompt_length(turn),
                    turn.prompt_ids,
                ),
                turn.continuation,
                turn.started_at,
                turn.finished_at,
            )
            for turn in turns
        ]
    )


def assemble(
    turns: Sequence[StoredTurn],
    *,
    session_id: SessionId,
    group_id: GroupId | None,
    task: str | None,
    first_message: bytes | None = None,
    reward: float | None,
    turn_rewards: Mapping[TurnId, float],
) -> Trajectory:
    """Return a session's turns as a trajectory, in the given order but with parents before children. Raise
    BrokenTree."""
    trainable = trainable_turns(turns)
    ordered = _parents_first(turns)
    superseded = _superseded(ordered)
    positions: dict[str, int] = {}
    nodes: list[TrajectoryTurn] = []
    for turn in ordered:
        positions[turn.id] = len(nodes)
        is_shadow = turn.state is TurnState.SHADOW
        nodes.append(
            TrajectoryTurn(
                id=turn.id,
                parent=None if turn.parent_id is None else positions[turn.parent_id],
                prefix_tokens=turn.prefix_tokens,
                packed_prompt_ids=turn.prompt_ids,
                packed_output_ids=turn.output_ids,
                packed_logprobs=turn.output_logprobs,
                spans=turn.spans,
                temperature=turn.sampling.temperature,
                convention=turn.sampling.logprob_convention,
                trainable=turn.id in trainable,
                reward=turn_rewards.get(turn.id),
                masked=turn.masked,
                finish_reason=turn.finish_reason,
                state=TurnState.COMPLETE if is_shadow else turn.state,
                # Whatever followed in the session did not follow from a shadow answer.
                superseded=is_shadow or turn.id in superseded,
            )
        )
    return Trajectory(
        session_id=session_id,
        group_id=group_id,
        task=task,
        first_message=None if first_message is None else bytes(first_message),
        turns=tuple(nodes),
        reward=reward,
    )


def _parents_first(turns: Iterable[StoredTurn]) -> list[StoredTurn]:
    ordered: list[StoredTurn] = []
    placed: set[str] = set()
    waiting = list(turns)
    while waiting:
        later: list[StoredTurn] = []
        for turn in waiting:
            if turn.parent_id is None or turn.parent_id in placed:
                ordered.append(turn)
                placed.add(turn.id)
            else:
                later.append(turn)
        if len(later) == len(waiting):
            raise BrokenTree(f"turn {later[0].id} continues {later[0].parent_id}, which is not of its trajectory")
        waiting = later
    return ordered
