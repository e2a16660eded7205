"""A session as it travels: everything that was recorded of it, in one record that stands alone.

As JSON it is one line of a `.jsonl` file; `parquet.py` has the columns. Unknown fields are refused, so that nothing
is lost in silence.
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

_TOKENS = 2**31
_HASH_BYTES = 16


class InvalidRecord(Exception):
    """A record that is none, or does not hold together. The message names the field."""


class TurnRecord(ExportedSessionTurn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a model call. `messages` are those that the call added to the conversation of its parent. Hashes are
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
    """An entry of the ledger, in order of arrival. `turn` is an index into the record's turns; null: the session."""

    id: str
    turn: int | None
    name: str
    value: float
    source: str
    comment: str | None
    after_training: bool
    created_at: float


class SessionRecord(ExportedSession, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`messages` and `tools` are the conversation of the last answer, in the shape of chat completions: for readers
    of the file; an import makes them anew. `origin` is the id that the session had where it was first recorded, if
    it was imported since."""

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
    """One line of JSON, with its end."""
    return json_text(msgspec.to_builtins(record)).encode() + b"\n"


def decode(line: bytes) -> SessionRecord:
    """Raises InvalidRecord."""
    try:
        record = msgspec.convert(json.loads(line, parse_constant=_no_number), SessionRecord)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise InvalidRecord(str(error)) from error
    check(record)
    return record


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def check(record: SessionRecord) -> None:
    """What types do not say. Raises InvalidRecord."""
    if record.format != SESSION_FORMAT:
        raise InvalidRecord(f"format is {SESSION_FORMAT!r}, not {record.format!r} - at `$.format`")
    if not 0 < len(record.session_id) <= 40:
        raise InvalidRecord("an id is 1 to 40 characters - at `$.session_id`")
    if record.state not in set(SessionState):
        raise InvalidRecord("state is open or ended - at `$.state`")
    if record.outcome is not None and record.outcome not in set(Outcome):
        raise InvalidRecord("outcome is completed, failed, cancelled or null - at `$.outcome`")
    lengths: list[int] = []
    for index, turn in enumerate(record.turns):
        _check_turn(turn, f"$.turns[{index}]", lengths)
    if len({turn.id for turn in record.turns}) != len(record.turns):
        raise InvalidRecord("two turns have one id - at `$.turns`")
    for index, reward in enumerate(record.rewards):
        if reward.turn is not None and not 0 <= reward.turn < len(record.turns):
            raise InvalidRecord(f"there is no turn {reward.turn} - at `$.rewards[{index}].turn`")
        if not math.isfinite(reward.value):
            raise InvalidRecord(f"a reward is a finite number - at `$.rewards[{index}].value`")


def as_turn(turn: TurnRecord, parent: str | None) -> Turn:
    """Raises ValueError for one that does not hold together."""
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
    """`lengths` are those of the paths of the turns before it, to which its own is added."""
    if turn.parent is not None and not 0 <= turn.parent < len(lengths):
        raise InvalidRecord(f"the parent is a turn before it - at `{where}.parent`")
    if not 0 < len(turn.id) <= 40:
        raise InvalidRecord(f"an id is 1 to 40 characters - at `{where}.id`")
    if not 0 <= turn.prefix_tokens <= (lengths[turn.parent] if turn.parent is not None else 0):
        raise InvalidRecord(f"it shares more tokens than there are - at `{where}.prefix_tokens`")
    for name in ("prompt_ids", "output_ids"):
        ids = getattr(turn, name)
        if ids and not (min(ids) >= 0 and max(ids) < _TOKENS):
            raise InvalidRecord(f"a token id is 0 to {_TOKENS - 1} - at `{where}.{name}`")
    if not all(map(math.isfinite, turn.logprobs)):
        raise InvalidRecord(f"a log-probability is a finite number - at `{where}.logprobs`")
    own = len(turn.prompt_ids) + len(turn.output_ids)
    end = 0
    for start, stop in turn.masked:
        if not end <= start < stop <= own:
            raise InvalidRecord(f"masked spans follow each other within the turn's tokens - at `{where}.masked`")
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
        raise InvalidRecord(f"a hash is {_HASH_BYTES} bytes in hexadecimal - at `{where}`")
