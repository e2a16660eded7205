"""Decide about the versions of runs: let candidates through their gates, and roll back a version that turned bad.

Everything is in the store: the states of versions, and the findings. Every proxy has a keeper, which looks every
second. Decisions are transactions under the run's lock that check again what they decide about, so of several proxies
one makes each of them, and a proxy that dies in between is replaced by any other, or by itself after its restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import VersionState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import BaseRlError, StoreUnavailable
from proxy.gates.change_point import first_fallen
from proxy.gates.decisions import BY, is_on_trial, promote, reject, roll_back, start_canary, start_shadow
from proxy.gates.evaluation_calls import EvaluationCalls
from proxy.gates.evidence import Evidence, joined
from proxy.gates.findings import (
    Finding,
    bounds_finding,
    canary_finding,
    evaluation_finding,
    guards_finding,
    watch_finding,
)
from proxy.gates.pair_findings import preference_finding, shadow_finding
from proxy.gates.pairs import AnswerPairSamples
from proxy.gates.repository import MOST_SESSIONS, GateRepository
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.runs.service import RunDirectory, RunView
from proxy.versions.repository import UNDECIDED, VersionRepository, wanted_version

# How often the comparison of a serving version that nothing is wrong with is computed in full, for people to see: a
# verdict needs only the means as long as they have not fallen.
_DRAWN_SECONDS = 10.0

# Served versions before the serving one with whose evaluations a candidate is compared too.
_EARLIER = 8

_LOG = logger(__name__)


class Candidate(NamedTuple):
    """An undecided version with what its gates have found. `calls_missing` are versions about which the evaluator is
    to be called."""

    row: AnyRow
    findings: list[Finding]
    calls_missing: list[int]

    @property
    def failed(self) -> Finding | None:
        return next((each for each in self.findings if each.state == "failed"), None)

    @property
    def has_passed(self) -> bool:
        return all(each.state == "passed" for each in self.findings)

    @property
    def waits_for_shadow(self) -> bool:
        """Whether the gates before the shadow have passed, and the shadow has not begun."""
        others = [each for each in self.findings if each.gate != "shadow"]
        return not is_on_trial(self.row) and all(each.state == "passed" for each in others)

    @property
    def waits_for(self) -> str:
        return "; ".join(each.text for each in self.findings if each.state == "waiting")


class Watched(NamedTuple):
    """What the watch has found: about the serving version, without evidence if it was not computed in full, and the
    suspected version to be taken back with its finding."""

    serving: int
    finding: Finding
    bad: tuple[int, Finding] | None


class GateKeeper:
    """Decides about the versions of all runs. `tend` makes one round."""

    def __init__(self, *, database: Database, runs: RunDirectory, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._evidence = Evidence()
        self._pairs = AnswerPairSamples()
        self._watched_before: dict[str, int] = {}
        """A hash of the sessions that the last comparison of a run was about: equal ones give the same result."""
        self._drawn: dict[str, tuple[float, int]] = {}
        """When the last comparison in full was made, and its hash."""

    async def tend(self) -> None:
        """Look at every run once, and decide what can be decided. Raises StoreUnavailable."""
        for run in await self._runs.list_():
            if run.is_archived:
                continue
            try:
                await self._tend(run)
            except StoreUnavailable:
                raise
            except BaseRlError as error:  # another proxy, or a person, changed the version meanwhile
                _LOG.warning("gates look again at the next round", run=run.name, error=error.message)

    async def _tend(self, run: RunView) -> None:
        release = run.settings.release
        if release.policy == "gated":
            await self._judge(run)
        elif release.policy == "immediate" and await self._database.read(partial(_is_left_over, run)):
            await self._commit(partial(_release_all, run))
        if release.rollback.max_drop is not None:
            await self._watch(run)

    async def _judge(self, run: RunView) -> None:
        candidates = await self._database.read(partial(self._candidates, run))
        if missing := sorted({version for each in candidates for version in each.calls_missing}):
            await self._commit(partial(_call_evaluator, run, missing), wakes=False)
            self._signals.jobs.notify()
        for candidate in candidates:
            if (failed := candidate.failed) is not None:
                await self._commit(partial(reject, run, candidate.row.version, candidate.findings, failed.text))
                return  # its descendants go with it, so the others are read again
        if await self._advance(run, candidates):
            return
        now, release = self._clock(), run.settings.release
        for candidate in candidates:
            version, findings = candidate.row.version, candidate.findings
            if now - candidate.row.created_at > release.timeout_seconds:
                text = f"not decided within {release.timeout_seconds:g} s (release.timeout_seconds)"
                waits = candidate.waits_for or "it waits for another version's canary"
                decide = partial(promote, run, version, findings, text)
                if release.on_timeout == "reject":
                    decide = partial(reject, run, version, findings, f"{text}: {waits}")
                await self._commit(decide)
                return
            await self._save(run, version, findings)

    async def _advance(self, run: RunView, candidates: Sequence[Candidate]) -> bool:
        """Promote the newest version that has passed all gates, or let the newest that is ready answer a share of new
        sessions, or of the prompts unseen. Return whether a version was promoted or begun."""
        ready = [each for each in candidates if each.has_passed]
        done = [each for each in ready if each.row.state == VersionState.CANARY or not _has_canary(run)]
        if done:
            await self._commit(partial(promote, run, done[-1].row.version, done[-1].findings, "its gates passed"))
            return True
        if any(each.row.state == VersionState.CANARY for each in candidates):
            return False
        if ready:
            await self._commit(partial(start_canary, run, ready[-1].row.version, ready[-1].findings))
            return True
        next_ = [each for each in candidates if each.waits_for_shadow]
        if not _has_shadow(run) or not next_ or any(is_on_trial(each.row) for each in candidates):
            return False
        await self._commit(partial(start_shadow, run, next_[-1].row.version))
        return True

    def _candidates(self, run: RunView, connection: Connection) -> list[Candidate]:
        repository = GateRepository(connection)
        against = wanted_version(VersionRepository(connection).run(run.id))
        return [self._candidate(connection, run, row, against) for row in repository.undecided(run.id)]

    def _candidate(self, connection: Connection, run: RunView, row: AnyRow, against: int) -> Candidate:
        release, repository = run.settings.release, GateRepository(connection)
        findings: list[Finding] = []
        calls_missing: list[int] = []
        if release.bounds.are_on:
            findings.append(bounds_finding(release, row.metrics))
        if (suite := release.evaluation.suite) is not None:
            new, old = (repository.results(run.id, version, suite) for version in (row.version, against))
            before = [each.version for each in repository.served(run.id, against, _EARLIER + 1)]
            earlier = {each: repository.results(run.id, each, suite) for each in before if each != against}
            finding = evaluation_finding(release, new, old, against=against, earlier=earlier)
            if finding.state == "waiting" and release.evaluation.url is not None:
                calls = EvaluationCalls(connection, run)
                tasks = release.evaluation.tasks
                short = [each for each, found in ((row.version, new), (against, old)) if len(found) < tasks]
                calls_missing = calls.missing(short)
                text = "; ".join([finding.text, *map(calls.describe, short)])
                finding = msgspec.structs.replace(finding, text=text)
            findings.append(finding)
        if _has_shadow(run):
            findings += self._shadow_findings(connection, run, row, against)
        if row.state == VersionState.CANARY:
            most = max(MOST_SESSIONS, release.canary.sessions)
            rows = [
                session
                for version in (row.version, against)
                for session in repository.trial_sessions(run.id, version, since=row.canary_at, most=most)
            ]
            arms = self._evidence.arms(connection, run, rows)
            canary, serving = joined(arms, (row.version,)), joined(arms, (against,))
            findings.append(canary_finding(release, canary, serving))
            findings.append(guards_finding(release, canary, serving, waits=True))
        return Candidate(row, findings, calls_missing)

    def _shadow_findings(self, connection: Connection, run: RunView, row: AnyRow, against: int) -> list[Finding]:
        """Return what the candidate's unseen answers show. Those of a canary were found before it began: no pair is
        added since, and the serving version may be another one now."""
        release = run.settings.release
        if row.state == VersionState.CANARY:
            stored = GateRepository(connection).findings(run.id, (row.version,))
            return [
                Finding(gate=each.gate, state=each.state, text=each.text, evidence=each.evidence)
                for each in stored
                if each.gate in ("shadow", "preference")
            ]
        if row.shadow_at is None:
            text = "waits until the gates before it have passed, and no other version is on trial"
            return [Finding(gate="shadow", state="waiting", text=text)]
        sample = self._pairs.read(connection, run, row.version, against)
        found = [shadow_finding(release, sample)]
        return found if release.preference.judge is None else [*found, preference_finding(release, sample)]

    async def _watch(self, run: RunView) -> None:
        watched = await self._database.read(partial(self._watched, run))
        if watched is None:
            return
        if watched.bad is not None:
            version, finding = watched.bad
            await self._commit(partial(roll_back, run, version, finding))
        elif watched.finding.evidence:
            await self._commit(partial(_save_watch, run, watched), wakes=False)

    def _watched(self, run: RunView, connection: Connection) -> Watched | None:
        """Compare each of the newest served versions, together with those after it, with those before it.

        A version that trains fast is replaced before it has enough sessions of its own, by one that inherits its
        fault; so those count as well.
        """
        release, repository = run.settings.release, GateRepository(connection)
        of_run = VersionRepository(connection).run(run.id)
        if of_run.pinned_version is not None:  # somebody has chosen the version that serves
            return None
        wanted = release.rollback
        served = repository.served(run.id, of_run.serving_version, wanted.window + wanted.predecessors)
        if len(served) < 2:
            return None
        versions = [row.version for row in served]
        since = min(row.served_at for row in served)
        rows = repository.sessions(run.id, versions, since=since)
        about = hash((release.model_dump_json(), *versions, *((row.id, row.reward) for row in rows)))
        now = self._clock()
        drawn_at, drawn = self._drawn.get(run.id, (-math.inf, 0))
        is_due = about != drawn and not 0 <= now - drawn_at < _DRAWN_SECONDS
        if about == self._watched_before.get(run.id) and not is_due:
            return None
        self._watched_before[run.id] = about
        if is_due:
            self._drawn[run.id] = now, about
        arms = self._evidence.arms(connection, run, rows)
        found: dict[int, Finding] = {}
        for index in range(min(wanted.window, len(versions) - 1)):
            before = joined(arms, versions[index + 1 : index + 1 + wanted.predecessors])
            suspects = joined(arms, versions[: index + 1])
            found[versions[index]] = watch_finding(release, suspects, before, is_drawn=is_due and index == 0)
        failed = [version for version, finding in found.items() if finding.state == "failed"]
        # The proof is where the means differ most: an earlier cut counts good versions among the bad ones.
        worst = min(failed, key=lambda version: _difference(found[version]), default=None)
        bad = None
        if worst is not None:
            proven = versions.index(worst)
            cut = proven + 1
            suspects, before = joined(arms, versions[:cut]), joined(arms, versions[cut : cut + wanted.predecessors])
            finding = watch_finding(release, suspects, before)
            first = versions[first_fallen(release, [joined(arms, (each,)) for each in versions], proven)]
            if first != worst:
                text = f"{finding.text}; it has fallen since version {first}"
                finding = msgspec.structs.replace(finding, text=text)
            bad = (first, finding)
        return Watched(versions[0], found[versions[0]], bad)

    async def _save(self, run: RunView, version: int, findings: Sequence[Finding]) -> None:
        def is_new(connection: Connection) -> bool:
            stored = GateRepository(connection).findings(run.id, (version,))
            return {(row.gate, row.state, row.text) for row in stored} != {
                (each.gate, each.state, each.text) for each in findings
            }

        if await self._database.read(is_new):
            await self._commit(partial(_save_undecided, run, version, findings), wakes=False)

    async def _commit(self, change: object, *, wakes: bool = True) -> None:
        assert callable(change)
        await self._database.commit(partial(change, now=self._clock()))
        if wakes:
            self._signals.versions.notify()
            self._signals.trajectories.notify()  # a trainer may have waited for the decision
        self._signals.events.notify()


def _call_evaluator(run: RunView, versions: Sequence[int], connection: Connection, *, now: float) -> None:
    calls = EvaluationCalls(connection, run)
    for version in versions:
        calls.enqueue(version, now=now)


def _has_shadow(run: RunView) -> bool:
    return run.settings.release.shadow.share > 0


def _has_canary(run: RunView) -> bool:
    return run.settings.release.canary.share > 0


def _difference(finding: Finding) -> float:
    difference = finding.evidence.get("difference")
    return 0.0 if difference is None else float(difference)


def _is_left_over(run: RunView, connection: Connection) -> bool:
    """Return whether the run still follows promotions of an earlier policy."""
    return VersionRepository(connection).run(run.id).promoted_version is not None


def _release_all(run: RunView, connection: Connection, *, now: float) -> None:
    """Let the engines follow the head, after the run's policy became `immediate`."""
    versions = VersionRepository(connection)
    promoted = versions.run(run.id, lock=True).promoted_version
    if promoted is None:
        return
    for row in GateRepository(connection).undecided(run.id):
        versions.set_state(run.id, row.version, VersionState.COMMITTED)
    versions.promote(run.id, None)
    data = {"version": versions.run(run.id).head_version, "before": promoted, "reason": "release.policy", "by": BY}
    append_event(connection, run_id=run.id, kind="version.promoted", data=data, now=now)


def _save_undecided(
    run: RunView, version: int, findings: Sequence[Finding], connection: Connection, *, now: float
) -> None:
    versions, repository = VersionRepository(connection), GateRepository(connection)
    versions.run(run.id, lock=True)
    if versions.version(run.id, version).state not in UNDECIDED:
        return  # decided meanwhile: the findings of the decision stay
    for finding in findings:
        repository.save(run.id, version, finding, now=now)


def _save_watch(run: RunView, watched: Watched, connection: Connection, *, now: float) -> None:
    versions, repository = VersionRepository(connection), GateRepository(connection)
    stored = repository.findings(run.id, (watched.serving,))
    if any(row.gate == "watch" and row.text == watched.finding.text for row in stored):
        return
    versions.run(run.id, lock=True)
    repository.save(run.id, watched.serving, watched.finding, now=now)
    repository.forget_watch(run.id, watched.serving)
