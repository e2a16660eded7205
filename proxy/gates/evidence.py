"""Samples of sessions for a comparison, with the values that guards look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy import Connection

from proxy.bounded_cache import BoundedCache
from proxy.contract.turn import FinishReason, TurnState
from proxy.database.rows import AnyRow
from proxy.gates.findings import Arm, guard_bounds
from proxy.gates.repository import GateRepository
from proxy.runs.service import RunView

# Openings of tool calls. The proxy leaves a call that it cannot read in the text of the answer.
_CALL_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")

# Sessions whose guarded values are remembered, some hundred bytes each: several comparisons of several runs.
_REMEMBERED = 20_000

TOKEN_BYTES = 4
"""Bytes of a token id in the store."""


class Evidence:
    """Reads samples of sessions. The values of an ended session do not change, so they are computed once."""

    def __init__(self) -> None:
        self._values: BoundedCache[tuple[str, str], Mapping[str, float]] = BoundedCache(_REMEMBERED)

    def arms(self, connection: Connection, run: RunView, rows: Sequence[AnyRow]) -> dict[int, Arm]:
        """Return the sessions of `rows`, as `GateRepository.sessions` returns them, by version."""
        settings, names = guard_settings(run), guard_bounds(run.settings.release.guards)
        if names:
            self._read(connection, run, settings, [row.id for row in rows])
        by_version: dict[int, list[AnyRow]] = defaultdict(list)
        for row in rows:
            by_version[row.newest_version].append(row)
        return {
            version: Arm(
                versions=(version,),
                rewards=tuple(row.reward for row in found if row.reward is not None),
                guards={name: tuple(self._of(found, settings, name)) for name in names},
                sessions=len(found),
            )
            for version, found in by_version.items()
        }

    def _of(self, rows: Sequence[AnyRow], settings: str, name: str) -> Iterable[float]:
        for row in rows:
            values = self._values.get((row.id, settings))
            if values is not None:
                yield values[name]

    def _read(self, connection: Connection, run: RunView, settings: str, session_ids: Sequence[str]) -> None:
        unknown = [each for each in session_ids if self._values.get((each, settings)) is None]
        calls: dict[str, list[AnyRow]] = defaultdict(list)
        for call in GateRepository(connection).calls(unknown):
            calls[call.session_id].append(call)
        for session_id, made in calls.items():
            self._values.put((session_id, settings), guarded_values(made, run))


def guard_settings(run: RunView) -> str:
    """Return the settings that determine guarded values, as a part of the key under which values are remembered."""
    guards = run.settings.release.guards
    return f"{guards.slow_seconds} {run.settings.max_new_tokens} {guards.refusal_texts}"


def guarded_values(calls: Sequence[AnyRow], run: RunView) -> dict[str, float]:
    """Return the guarded values of a session with these calls, each a mean in [0, 1] over the calls."""
    guards = run.settings.release.guards
    refusals = [text.strip() for text in guards.refusal_texts.lower().split(";") if text.strip()]
    answered = [call for call in calls if call.state != TurnState.FAILED.value]
    texts = [_text(call.response) for call in answered]

    def share(hits: Collection[bool]) -> float:
        return sum(hits) / len(hits) if hits else 0.0

    filtered = [call.finish_reason == FinishReason.CONTENT_FILTER.value for call in answered]
    refused = [any(each in text.lower() for each in refusals) for text in texts]
    lengths = [min(1.0, (call.output_bytes or 0) / TOKEN_BYTES / run.settings.max_new_tokens) for call in answered]
    return {
        "failed_calls": share([call.state == TurnState.FAILED.value for call in calls]),
        "broken_tool_calls": share([any(opening in text for opening in _CALL_OPENINGS) for text in texts]),
        "cut_answers": share([call.finish_reason == FinishReason.LENGTH.value for call in answered]),
        "answer_length": sum(lengths) / len(lengths) if lengths else 0.0,
        "refusals": share([one or other for one, other in zip(filtered, refused, strict=True)]),
        "slow_calls": share([call.seconds > guards.slow_seconds for call in calls]),
    }


def joined(arms: Mapping[int, Arm], versions: Iterable[int]) -> Arm:
    """Return the sessions of several versions as one sample, those of older versions first."""
    found = [arms[version] for version in sorted(versions) if version in arms]
    guards: dict[str, tuple[float, ...]] = {}
    for arm in found:
        for name, values in arm.guards.items():
            guards[name] = guards.get(name, ()) + values
    return Arm(
        versions=tuple(version for arm in found for version in arm.versions),
        rewards=tuple(reward for arm in found for reward in arm.rewards),
        guards=guards,
        sessions=sum(arm.sessions for arm in found),
    )


def _text(response: object) -> str:
    match response:
        case {"choices": [{"text": str(text)}, *_]}:
            return text
    return ""
