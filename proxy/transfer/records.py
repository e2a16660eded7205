"""The exported form of a session: one self-contained record of everything the store has of it.

In JSON, a record is one line of a `.jsonl` file; `parquet.py` defines the columns. Unknown fields are refused, so
that an import never drops data silently.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from proxy.contract.export import SESSION_FORMAT, ExportedSession, ExportedSessionTurn
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.states import Outcome, SessionState
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, Turn, VersionSpan
from proxy.database.packed_json import json_text

# Token ids are stored as 32-bit integers.
_TOKENS = 2**31
_HASH_BYTES = 16


class InvalidRecord(Exception):
    """A line or row is no record, or its fields contradict each other. The message names the field."""


class TurnRecord(ExportedSessionTurn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete model call. `messages` are those that the call added to its parent's conversation. Hashes are
    hexadecimal."""

    sampling: SamplingParameters
    finish_reason: FinishReason
    continuation: Continuation
    attributed_by: str
    prompt_token_count: int
    started_at: float
    first_token_at: float | None
    finished_at: float
    conversation_hash: str
    settled_hash: str | None
    tools_hash: str
    messages: list[dict[str, Any]]
    request: dict[str, Any]
    response: dict[str, Any]
    reward: float | None = None


class RewardRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the reward ledger. `turn` is an index into the record's turns; None for a reward of the session."""

    id: str
    turn: int | None
    name: str
    value: float
    source: str
    comment: str | None
    after_training: bool
    created_at: float


class SessionRecord(ExportedSession, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete session, with its turns and its rewards in order of arrival.

    `messages` and `tools` are the conversation of the last answer as chat-completion messages, for readers of the
    file; an import ignores them. `origin` is the session's id in the store that first recorded it; None if that is
    this store.
    """

    run: str
    origin: str | None
    external_id: str | None
    group: str | None
    group_size: int | None
    metadata: dict[str, Any] | None
    attributed_by: str
    training: str
    outcome: str | None
    end_reason: str | None
    consumed_by: int | None
    last_active_at: float
    ended_at: float | None
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    turns: tuple[TurnRecord, ...]
    rewards: tuple[RewardRecord, ...]


def encode(record: SessionRecord) -> bytes:
    """Return the record as one line of JSON, line end included."""
    return json_text(msgspec.to_builtins(record)).encode() + b"\n"


def decode(line: bytes) -> SessionRecord:
    """Parse one line of JSON. Raise InvalidRecord if it is not a valid session."""
    try:
        record = msgspec.convert(json.loads(line, parse_constant=_refuse_constant), SessionRecord)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise InvalidRecord(str(error)) from error
    check(record)
    return record


def _refuse_constant(text: str) -> float:
    # Python's parser accepts NaN and Infinity, which JSON does not have.
    raise ValueError(f"{text} is not valid JSON")


def check(record: SessionRecord) -> None:
    """Check what the types do not express. Raise InvalidRecord."""
    if record.format != SESSION_FORMAT:
        raise InvalidRecord(f"expected format {SESSION_FORMAT!r}, got {record.format!r} - at `$.format`")
    if not 0 < len(record.session_id) <= 40:
        raise InvalidRecord("an id must have 1 to 40 characters - at `$.session_id`")
    if record.state not in set(SessionState):
        raise InvalidRecord("state must be open or ended - at `$.state`")
    if record.outcome is not None and record.outcome not in set(Outcome):
        raise InvalidRecord("outcome must be completed, failed, cancelled or null - at `$.outcome`")
    # Path length of each turn in tokens; parents come first, so one pass suffices.
    lengths: list[int] = []
    for index, turn in enumerate(record.turns):
        _check_turn(turn, f"$.turns[{index}]", lengths)
    if len({turn.id for turn in record.turns}) != len(record.turns):
        raise InvalidRecord("two turns have the same id - at `$.turns`")
    for index, reward in enumerate(record.rewards):
        if reward.turn is not None and not 0 <= reward.turn < len(record.turns):
            raise InvalidRecord(f"there is no turn {reward.turn} - at `$.rewards[{index}].turn`")
        if not math.isfinite(reward.value):
            raise InvalidRecord(f"a reward must be a finite number - at `$.rewards[{index}].value`")


def as_turn(turn: TurnRecord, parent: str | None) -> Turn:
    """Return the turn as a contract type. Raise ValueError if its fields contradict each other."""
    return Turn(
        id=TurnId(turn.id),
        session_id=SessionId(""),
        parent_id=None if parent is None else TurnId(parent),
        prefix_tokens=turn.prefix_tokens,
        prompt_ids=turn.prompt_ids,
        output_ids=turn.output_ids,
        output_logprobs=turn.logprobs,
        spans=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in turn.versions),
        sampling=turn.sampling,
        finish_reason=turn.finish_reason,
        continuation=turn.continuation,
        state=turn.state,
        started_at=turn.started_at,
        first_token_at=turn.first_token_at,
        finished_at=turn.finished_at,
        masked=turn.masked,
    )


def _check_turn(turn: TurnRecord, where: str, lengths: list[int]) -> None:
    """Check one turn; raise InvalidRecord. `lengths` are the path lengths, in tokens, of the turns before it; its own
    is appended."""
    if turn.parent is not None and not 0 <= turn.parent < len(lengths):
        raise InvalidRecord(f"the parent must be an earlier turn - at `{where}.parent`")
    if not 0 < len(turn.id) <= 40:
        raise InvalidRecord(f"an id must have 1 to 40 characters - at `{where}.id`")
    if not 0 <= turn.prefix_tokens <= (lengths[turn.parent] if turn.parent is not None else 0):
        raise InvalidRecord(f"longer than the parent's tokens - at `{where}.prefix_tokens`")
    for name in ("prompt_ids", "output_ids"):
        ids = getattr(turn, name)
        if ids and not (min(ids) >= 0 and max(ids) < _TOKENS):
            raise InvalidRecord(f"a token id must be 0 to {_TOKENS - 1} - at `{where}.{name}`")
    if not all(map(math.isfinite, turn.logprobs)):
        raise InvalidRecord(f"a log-probability must be a finite number - at `{where}.logprobs`")
    own = len(turn.prompt_ids) + len(turn.output_ids)
    end = 0
    for start, stop in turn.masked:
        if not end <= start < stop <= own:
            raise InvalidRecord(f"masked spans must be ascending and within the turn's tokens - at `{where}.masked`")
        end = stop
    for name in ("conversation_hash", "settled_hash", "tools_hash"):
        _check_hash(getattr(turn, name), f"{where}.{name}")
    try:
        as_turn(turn, None if turn.parent is None else "a turn before it")
    except ValueError as error:
        raise InvalidRecord(f"{error} - at `{where}`") from error
    lengths.append(turn.prefix_tokens + own)


def _check_hash(text: str | None, where: str) -> None:
    if text is None:
        return
    try:
        is_hash = len(bytes.fromhex(text)) == _HASH_BYTES
    except ValueError:
        is_hash = False
    if not is_hash:
        raise InvalidRecord(f"a hash must be {_HASH_BYTES} bytes in hexadecimal - at `{where}`")
