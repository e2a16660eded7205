"""The lines of an export: what can be learnt from of a session, or of a preference. Token ids are as recorded.

What else an export says of them is the proxy's (`proxy/transfer`), whose records extend these.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.trajectory import Purpose
from proxy.contract.turn import Continuation, TurnState

SESSION_FORMAT = "base-rl/1"
PREFERENCE_FORMAT = "base-rl-preference/1"


class ExportedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A model call, in the words of `contract.turn.Turn`. `parent` is an index into the line's turns, smaller than
    its own. `logprobs` belong to `output_ids` one to one, `versions` are [version, start, end) over them.
    `masked` are [start, end) over `prompt_ids` followed by `output_ids`: redacted."""

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
    """A model call of a session, with what tells whether the agent used its answer. Lines that other programs wrote
    may leave these fields out."""

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
    """`preferred`: its output is what the preference is about; of other calls it is context."""

    preferred: bool


class ExportedSide(msgspec.Struct, frozen=True, kw_only=True):
    """A session, or one of its turns with those that it goes on from. `reward` is the session's."""

    session_id: str
    purpose: Purpose
    reward: float | None
    turns: tuple[ExportedSideTurn, ...]


class ExportedPreference(msgspec.Struct, frozen=True, kw_only=True):
    """That `chosen` went better than `rejected`."""

    format: str
    id: str
    source: str
    created_at: float
    chosen: ExportedSide
    rejected: ExportedSide


def plain_spans(turn: dict[str, Any]) -> None:
    """Makes the spans of a turn in a Parquet file, whose columns have names, those of its line. Raises KeyError and
    TypeError for what is none."""
    turn["versions"] = [(span["version"], span["start"], span["end"]) for span in turn["versions"]]
    turn["masked"] = [(span["start"], span["end"]) for span in turn["masked"]]
