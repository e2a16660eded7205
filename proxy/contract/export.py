"""The lines of an export: the trainable part of a session or of a preference, with token ids as recorded.

The records that the proxy writes (`proxy/transfer`) extend these by descriptive fields.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.trajectory import Purpose
from proxy.contract.turn import Continuation, TurnState

SESSION_FORMAT = "base-rl/1"
PREFERENCE_FORMAT = "base-rl-preference/1"


class ExportedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, with the fields of `contract.turn.Turn`.

    `parent` is an index into the line's turns, smaller than the turn's own. `logprobs` belong to `output_ids` one to
    one; `versions` are [version, start, end) over these. `masked` are redacted spans, [start, end) over `prompt_ids`
    followed by `output_ids`.
    """

    id: str
    parent: int | None
    prefix_tokens: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int, int], ...]
    masked: tuple[tuple[int, int], ...] = ()
    state: TurnState


class ExportedSessionTurn(ExportedTurn, frozen=True, kw_only=True):
    """A model call of a session. The added fields show whether the agent used its answer; lines written by other
    programs may omit them."""

    continuation: Continuation = Continuation.NEW
    started_at: float = 0.0
    finished_at: float = 0.0


class ExportedSession(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    session_id: str
    task: str | None
    purpose: Purpose
    state: str
    reward: float | None
    created_at: float
    turns: tuple[ExportedSessionTurn, ...]


class ExportedSideTurn(ExportedTurn, frozen=True, kw_only=True):
    """A model call of one side. `preferred`: the preference is about its output; other calls are context."""

    preferred: bool


class ExportedSide(msgspec.Struct, frozen=True, kw_only=True):
    """A session, or one of its turns with the turns before it. `reward` is the session's."""

    session_id: str
    purpose: Purpose
    reward: float | None
    turns: tuple[ExportedSideTurn, ...]


class ExportedPreference(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that `chosen` is better than `rejected`."""

    format: str
    id: str
    source: str
    created_at: float
    chosen: ExportedSide
    rejected: ExportedSide


def plain_spans(turn: dict[str, Any]) -> None:
    """Convert, in place, the spans of a turn from a Parquet file, which have named fields, to the tuples of an export
    line. Raise KeyError or TypeError for anything that is not a span."""
    turn["versions"] = [(span["version"], span["start"], span["end"]) for span in turn["versions"]]
    turn["masked"] = [(span["start"], span["end"]) for span in turn["masked"]]
