"""Sessions and preferences of an export as data of a fit, from the proxy or from files of `base-rl export`.

Token ids are as they were recorded. Only the fields that are learnt from are read.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.choices import Asked, Prompt, superseded_turns
from proxy.contract.export import (
    PREFERENCE_FORMAT,
    SESSION_FORMAT,
    ExportedPreference,
    ExportedSession,
    ExportedSessionTurn,
    ExportedSide,
    ExportedTurn,
    plain_spans,
)
from proxy.contract.identifiers import PreferenceId, SessionId, TurnId
from proxy.contract.trajectory import Purpose, Trajectory, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, TurnPlace, TurnState, VersionSpan, abandoned_turns
from trainer.batching.staleness import is_trained, well_formed
from trainer.errors import NothingToFit


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A filter of sessions or preferences; None: any. Times are seconds since the epoch, `until` is exclusive.
    `source` filters preferences, times both, and the rest sessions."""

    since: float | None = None
    until: float | None = None
    version: int | None = None
    min_reward: float | None = None
    task: str | None = None
    sessions: tuple[str, ...] | None = None
    source: str | None = None

    def query(self, *, of_sessions: bool) -> list[tuple[str, str]]:
        """Return the filter as the query of the proxy's export."""
        wanted: dict[str, float | str | None] = {"since": self.since, "until": self.until}
        if of_sessions:
            wanted |= {"version": self.version, "min_reward": self.min_reward, "task": self.task}
            wanted |= {"purpose": Purpose.TRAIN.value, "state": "ended"}
        else:
            wanted |= {"source": self.source}
        named = [("session", session_id) for session_id in self.sessions or ()]
        return [(key, str(value)) for key, value in wanted.items() if value is not None] + named

    def takes(self, session: ExportedSession) -> bool:
        """Return whether a session is selected: never a session for evaluation, nor an open one, which is
        incomplete."""
        versions = [version for turn in session.turns for version, _start, _end in turn.versions]
        return (
            session.purpose is Purpose.TRAIN
            and session.state == "ended"
            and self._in_time(session.created_at)
            and (self.version is None or self.version in versions)
            and (self.min_reward is None or (session.reward is not None and session.reward >= self.min_reward))
            and (self.task is None or session.task == self.task)
            and (self.sessions is None or session.session_id in self.sessions)
        )

    def takes_preference(self, preference: ExportedPreference) -> bool:
        return (
            preference.chosen.purpose is Purpose.TRAIN
            and preference.rejected.purpose is Purpose.TRAIN
            and self._in_time(preference.created_at)
            and (self.source is None or preference.source == self.source)
        )

    def _in_time(self, moment: float) -> bool:
        return (self.since is None or moment >= self.since) and (self.until is None or moment < self.until)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A session to imitate. The turns to learn are those that are trained (`intake.staleness.is_trained`)."""

    id: str
    trajectory: Trajectory

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return (self.trajectory,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """A session that is labelled desirable or not. The turns to learn are those that are trained."""

    id: str
    trajectory: Trajectory
    desirable: bool

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return (self.trajectory,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The two sides of a preference. The compared outputs are their trained turns."""

    id: str
    chosen: Trajectory
    rejected: Trajectory

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return (self.chosen, self.rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Examples to imitate. `dropped` counts selected sessions that cannot be learnt from: their tokens are not the
    model's, or none is trained."""

    examples: tuple[Example, ...]
    dropped: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    pairs: tuple[Pair, ...]
    dropped: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Labelled examples. `dropped` counts selected sessions that cannot be learnt from; `without_reward` of them
    have no reward to compare with the threshold."""

    labelled: tuple[Labelled, ...]
    dropped: int
    without_reward: int


_Kept = TypeVar("_Kept", Example, Pair, Labelled)


def examples_of(lines: Iterable[bytes], selection: Selection, vocabulary: int) -> Examples:
    """Read the selected sessions for a model with this number of token ids. Raises NothingToFit for a line that is
    no session."""
    sessions = [session for session in _decoded(lines, SESSION_FORMAT, ExportedSession) if selection.takes(session)]
    examples = [Example(id=each.session_id, trajectory=_of_session(each)) for each in sessions]
    kept = tuple(each for each in examples if is_learnable(each.trajectory, vocabulary))
    return Examples(examples=kept, dropped=len(examples) - len(kept))


def labelled_of(lines: Iterable[bytes], selection: Selection, vocabulary: int, threshold: float) -> Labels:
    """Label sessions with a reward of at least `threshold` desirable and the others not, for a model with this
    number of token ids. Raises NothingToFit for a line that is no session."""
    sessions = [session for session in _decoded(lines, SESSION_FORMAT, ExportedSession) if selection.takes(session)]
    kept = [
        Labelled(id=each.session_id, trajectory=trajectory, desirable=each.reward >= threshold)
        for each in sessions
        if each.reward is not None and is_learnable(trajectory := _of_session(each), vocabulary)
    ]
    without = sum(each.reward is None for each in sessions)
    return Labels(labelled=tuple(kept), dropped=len(sessions) - len(kept), without_reward=without)


def pairs_of(lines: Iterable[bytes], selection: Selection, vocabulary: int, *, last_alone: bool = False) -> Pairs:
    """Read the selected preferences for a model with this number of token ids. With `last_alone`, only the last
    answer of a side that is a session is trained. Raises NothingToFit for a line that is no preference."""
    taken = [
        each for each in _decoded(lines, PREFERENCE_FORMAT, ExportedPreference) if selection.takes_preference(each)
    ]
    pairs = [
        Pair(id=each.id, chosen=_of_side(each.chosen, last_alone), rejected=_of_side(each.rejected, last_alone))
        for each in taken
    ]
    kept = tuple(
        each for each in pairs if is_learnable(each.chosen, vocabulary) and is_learnable(each.rejected, vocabulary)
    )
    return Pairs(pairs=kept, dropped=len(pairs) - len(kept))


def held_out(found: Sequence[_Kept], share: float) -> tuple[list[_Kept], list[_Kept]]:
    """Return (items to learn from, items held out). The hash of each id decides, so that other items change the
    choice little. With a share above 0, at least one item is in each part."""
    ordered = sorted(found, key=lambda each: hashlib.sha256(each.id.encode()).digest())
    count = min(max(round(share * len(ordered)), 1 if share > 0 else 0), max(len(ordered) - 1, 0))
    return ordered[count:], ordered[:count]


def sessions_in(found: Sequence[Example | Labelled | Pair]) -> tuple[SessionId, ...]:
    """Return the ids of the items' sessions, each once, in order."""
    return tuple(sorted({trajectory.session_id for each in found for trajectory in each.trajectories}))


def preferences_in(found: Sequence[Example | Labelled | Pair]) -> tuple[PreferenceId, ...]:
    return tuple(sorted(PreferenceId(each.id) for each in found if isinstance(each, Pair)))


def lines_of(source: Path) -> Iterator[bytes]:
    """Read the records of a .jsonl or .parquet file, or of all such files in an exported folder. Raises NothingToFit
    if there are none."""
    for path in _files(source):
        if path.suffix == ".parquet":
            yield from _rows_of(path)
        else:
            with path.open("rb") as file:
                yield from (line for line in file if line.strip())


_Record = TypeVar("_Record")


def _decoded(lines: Iterable[bytes], wanted: str, kind: type[_Record]) -> Iterator[_Record]:
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            found = value.get("format") if isinstance(value, dict) else None
            if found != wanted:
                what = "sessions" if wanted == SESSION_FORMAT else "preferences (base-rl export --preferences)"
                raise NothingToFit(f"record {number} is of format {found!r}, not {wanted!r}: {what} are wanted here")
            yield msgspec.convert(value, kind)
        except (ValueError, RecursionError) as error:
            raise NothingToFit(f"record {number} is none that base-rl exported: {error}") from error


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    folder = source / "data" if (source / "data").is_dir() else source
    found = sorted([*folder.glob("*.jsonl"), *folder.glob("*.parquet")])
    if not found:
        raise NothingToFit(f"{source}: no .jsonl and no .parquet file there")
    return found


def _rows_of(path: Path) -> Iterator[bytes]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        remedy = "in the clone, pip install -c constraints.txt -e '.[export]'"
        raise NothingToFit(f"{path}: Parquet needs pyarrow: {remedy}") from error
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=16):
            for row in batch.to_pylist():
                try:
                    for turn in row.get("turns") or ():
                        plain_spans(turn)
                except (KeyError, TypeError) as error:
                    raise NothingToFit(f"{path}: these rows are none that base-rl exported: {error!r}") from error
                yield json.dumps(row).encode()


def _of_session(session: ExportedSession) -> Trajectory:
    unused = _unused(session.turns)
    answered = [index for index, turn in enumerate(session.turns) if _has_output(turn) and turn.id not in unused]
    return _trajectory(session.session_id, session.turns, answered, session.reward)


def _of_side(side: ExportedSide, last_alone: bool) -> Trajectory:
    preferred = [index for index, turn in enumerate(side.turns) if turn.preferred and _has_output(turn)]
    return _trajectory(side.session_id, side.turns, preferred[-1:] if last_alone else preferred, side.reward)


def _unused(turns: Sequence[ExportedSessionTurn]) -> frozenset[str]:
    """Return the turns whose answer the agent never saw or did not continue from. A good outcome of the session is
    not due to them, so they are no examples."""
    if any(turn.parent is not None and not 0 <= turn.parent < place for place, turn in enumerate(turns)):
        return frozenset()  # no tree: the session is dropped as a whole
    prompts = [
        Prompt(turn.parent, turn.prefix_tokens, turn.prefix_tokens + len(turn.prompt_ids), turn.prompt_ids)
        for turn in turns
    ]
    superseded = superseded_turns(
        [
            Asked(turn.id, prompt, turn.continuation, turn.started_at, turn.finished_at)
            for turn, prompt in zip(turns, prompts, strict=True)
        ]
    )
    abandoned = abandoned_turns(
        TurnPlace(
            turn.id, None if turn.parent is None else turns[turn.parent].id, prompt.shared, prompt.tokens, turn.state
        )
        for turn, prompt in zip(turns, prompts, strict=True)
    )
    return superseded | abandoned


def _has_output(turn: ExportedTurn) -> bool:
    return turn.state not in (TurnState.FAILED, TurnState.SHADOW) and bool(turn.output_ids)


def _trajectory(
    session_id: str, turns: Sequence[ExportedTurn], learnt: Collection[int], reward: float | None
) -> Trajectory:
    """Return the trajectory of a record; `learnt` are the places of the turns whose outputs are trained.

    All turns get temperature 1, at which the policy is fitted, however they were drawn; so greedy turns count too.
    """
    return Trajectory(
        session_id=SessionId(session_id),
        group_id=None,
        task=None,
        reward=reward,
        turns=tuple(
            TrajectoryTurn(
                id=TurnId(turn.id),
                parent=turn.parent,
                prefix_tokens=turn.prefix_tokens,
                packed_prompt_ids=pack_ids(turn.prompt_ids),
                packed_output_ids=pack_ids(turn.output_ids),
                packed_logprobs=pack_logprobs(turn.logprobs),
                spans=tuple(
                    VersionSpan(version=number, start=start, end=end) for number, start, end in turn.versions
                ),
                temperature=1.0,
                convention=LogprobConvention.SAMPLED,
                trainable=index in learnt,
                masked=turn.masked,
            )
            for index, turn in enumerate(turns)
        ),
    )


def is_learnable(trajectory: Trajectory, vocabulary: int) -> bool:
    """Return whether the token tree is valid for a model with this number of token ids and has tokens to learn."""
    return well_formed(trajectory, vocabulary) and any(map(is_trained, trajectory.turns))
