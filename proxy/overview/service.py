"""Read models of runs, sessions, turns, rewards and steps, and the switches that an operator has.

Wiring (proxy/app.py):

    app.state.overview = OverviewService(
        database=database, clock=system_clock, signals=signals, swaps=swaps,
        data_dir=settings.server.data_dir, token_text=template.token_text,
    )
    app.include_router(proxy.overview.endpoints.router)
    ...
    app.state.overview.close()   # when the server begins to stop: event streams do not end by themselves
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Row

from proxy.clock import Clock
from proxy.database.events import append_event
from proxy.database.signals import Signals
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from proxy.overview import assembly
from proxy.overview.assembly import StepFacts, TokenText
from proxy.overview.filters import MAX_PAGE, Cursor, SessionFilter
from proxy.overview.live import RateHistory, Remembered
from proxy.overview.repository import OverviewRepository
from proxy.overview.views import (
    REWARD_WINDOW,
    TRAINING_STATES,
    Curves,
    Health,
    KeyHolder,
    RewardPage,
    RunHealth,
    RunList,
    RunSummary,
    SessionPage,
    SessionView,
    Snapshot,
    StepPage,
    StepPoint,
    StepTrajectory,
    StepView,
    TurnView,
)
from proxy.settings import RunSettings

AnyRow = Row[*tuple[Any, ...]]

_POLL_S = 1.0
_GAP_S = 0.5
_HEARTBEAT_S = 15.0
_FIRST_EVENTS = 20
_MAX_EVENTS = 200
_STEP_POINTS = 600
_KEPT_STEPS = 4096
_LOW_DISK_BYTES = 1 << 30
_RECENT_SESSIONS = 200


class ServingStatus(Protocol):
    """What the health view asks of the swap controller."""

    @property
    def engine_ready(self) -> bool: ...


class OverviewService:
    """Everything raises NotFound for what is not there and StoreUnavailable while the database is down.

    `hold_seconds`: how long costly figures of a run are kept at least; 0 in tests.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        signals: Signals,
        swaps: ServingStatus | None = None,
        data_dir: Path | None = None,
        token_text: TokenText | None = None,
        hold_seconds: float = 0.5,
    ) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._swaps = swaps
        self._data_dir = data_dir
        self._token_text = token_text
        self._remembered = Remembered(hold_seconds)
        self._rates: dict[str, RateHistory] = {}
        self._late: dict[str, tuple[int, int]] = {}
        self._facts: OrderedDict[tuple[str, int], StepFacts] = OrderedDict()
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends all event streams."""
        self._closed.set()

    def now(self) -> float:
        """The time that everything here is told in."""
        return self._clock()

    # Runs

    async def runs(self) -> RunList:
        async with self._database.read() as connection:
            rows = await OverviewRepository(connection).runs()
        return RunList(runs=tuple([await self._summary(row) for row in rows]))

    async def run(self, name_or_id: str) -> RunSummary:
        return await self._summary(await self._run_row(name_or_id))

    async def run_id(self, name_or_id: str) -> str:
        """A name wins over an id."""
        return str((await self._run_row(name_or_id)).id)

    async def curves(self, name_or_id: str) -> Curves:
        """The reward of the whole run; the newest 600 versions; the token rate of the last ten minutes."""
        run = await self._run_row(name_or_id)
        return await self._remembered.get(("curves", run.id), lambda: self._curves(run.id))

    async def pause(self, name_or_id: str) -> RunSummary:
        """The trainer gets no more trajectories of a paused run; agents are served. Raises Conflict if archived."""
        return await self._switch(name_or_id, "paused", "run.paused")

    async def resume(self, name_or_id: str) -> RunSummary:
        return await self._switch(name_or_id, "active", "run.resumed")

    async def _switch(self, name_or_id: str, state: str, kind: str) -> RunSummary:
        run = await self._run_row(name_or_id)
        if run.state == "archived":
            raise Conflict(f"the run {run.name!r} is archived")
        async with self._database.write() as connection:
            if await OverviewRepository(connection).set_run_state(run.id, state, unless="archived"):
                await append_event(connection, run_id=run.id, kind=kind, data={}, now=self._clock())
        self._signals.events.notify()
        self._signals.trajectories.notify()
        return await self.run(run.id)

    async def _run_row(self, name_or_id: str) -> AnyRow:
        async with self._database.read() as connection:
            row = await OverviewRepository(connection).run(name_or_id)
        if row is None:
            raise NotFound(f"there is no run {name_or_id!r}")
        return row

    async def _summary(self, run: AnyRow) -> RunSummary:
        """The row's own figures as of now, the counted ones as remembered."""
        counted, turns, last_activity_at, swaps = await self._remembered.get(
            ("totals", run.id), lambda: self._totals(run.id)
        )
        recent = await self._remembered.get(("recent", run.id), lambda: self._recent(run.id))
        rewards, open_sessions, facts, inexact, late, rate = recent
        return RunSummary(
            id=run.id,
            name=run.name,
            state=run.state,
            base_model=run.base_model,
            created_at=run.created_at,
            head_version=run.head_version,
            serving_version=run.serving_version,
            sessions={state: counted.get(state, 0) for state in TRAINING_STATES},
            session_count=sum(counted.values()),
            open_sessions=open_sessions,
            turn_count=turns,
            swaps=swaps,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            reward_count=len(rewards),
            staleness_mean=facts.staleness_mean if facts is not None else None,
            staleness_max=facts.staleness_max if facts is not None else None,
            tokens_per_second=rate,
            late_rewards=late,
            inexact_share=inexact,
            last_activity_at=last_activity_at,
        )

    async def _totals(self, run_id: str) -> tuple[dict[str, int], int, float | None, int]:
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            counted = await repository.sessions_by_training(run_id)
            totals = await repository.totals(run_id)
            swaps = await repository.swap_count(run_id)
        return counted, int(totals.turns), totals.last_active_at, swaps

    async def _recent(self, run_id: str) -> tuple[list[float], int, StepFacts | None, float | None, int, float]:
        seen, late = self._late.get(run_id, (0, 0))
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            rewards = await repository.last_rewards(run_id, REWARD_WINDOW)
            open_sessions = await repository.open_sessions(run_id)
            newest = await repository.version_times(run_id, 1)
            facts = await self._facts_of(repository, run_id, [row.version for row in newest if row.version > 0])
            continuations = await repository.continuations(run_id, _RECENT_SESSIONS)
            more = await repository.late_rewards(run_id, seen)
        if more.last is not None:
            self._late[run_id] = (more.last, late + int(more.entries))
        now = self._clock()
        rate = self._rates.setdefault(run_id, RateHistory(run_id))
        await rate.update(self._database, now)
        continued = sum(count for kind, count in continuations.items() if kind != "new")
        inexact = 1.0 - continuations.get("exact", 0) / continued if continued else None
        return (
            rewards,
            open_sessions,
            next(iter(facts.values()), None),
            inexact,
            self._late.get(run_id, (0, 0))[1],
            rate.last_minute(now),
        )

    async def _curves(self, run_id: str) -> Curves:
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            counted = await repository.sessions_by_training(run_id)
            stride = assembly.bucket_stride(sum(counted.values()))
            buckets = await repository.reward_buckets(run_id, stride)
            times = await repository.version_times(run_id, _STEP_POINTS)
            facts = await self._facts_of(repository, run_id, [row.version for row in times])
        now = self._clock()
        rate = self._rates.setdefault(run_id, RateHistory(run_id))
        await rate.update(self._database, now)
        return Curves(
            window=REWARD_WINDOW,
            reward=assembly.reward_points([(row.sessions, row.at, row.total) for row in buckets], REWARD_WINDOW),
            steps=tuple(
                StepPoint(
                    version=row.version,
                    at=row.created_at,
                    served_at=row.served_at,
                    staleness_mean=facts[row.version].staleness_mean,
                    staleness_max=facts[row.version].staleness_max,
                    swap_seconds=row.swap_seconds,
                    reward_mean=facts[row.version].reward_mean,
                )
                for row in reversed(times)
            ),
            rate=rate.points(now),
        )

    async def _facts_of(
        self, repository: OverviewRepository, run_id: str, versions: Sequence[int]
    ) -> dict[int, StepFacts]:
        """A step's audit never changes: it is read once."""
        unknown = [version for version in versions if (run_id, version) not in self._facts]
        found = {version: self._facts[run_id, version] for version in versions if version not in unknown}
        if unknown:
            for version, audit in (await repository.audits(run_id, unknown)).items():
                found[version] = assembly.step_facts(assembly.audit_of(audit))
                self._facts[run_id, version] = found[version]
        while len(self._facts) > _KEPT_STEPS:
            self._facts.popitem(last=False)
        return found

    # Sessions, turns, rewards

    async def sessions(
        self, name_or_id: str, wanted: SessionFilter, *, cursor: str | None = None, limit: int = 50
    ) -> SessionPage:
        """Newest first. Raises InvalidRequest for a cursor that no page gave out."""
        run_id = await self.run_id(name_or_id)
        size = _page_size(limit)
        after = Cursor.decode(cursor) if cursor else None
        async with self._database.read() as connection:
            rows = await OverviewRepository(connection).sessions(run_id, wanted, after=after, limit=size + 1)
        items = tuple(assembly.session_item(row) for row in rows[:size])
        last = items[-1] if len(rows) > size else None
        return SessionPage(
            sessions=items,
            next_cursor=Cursor(at=last.created_at, key=last.id).encode() if last is not None else None,
        )

    async def session(self, session_id: str, *, with_tokens: bool = False) -> SessionView:
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            row = await repository.session(session_id)
            if row is None:
                raise NotFound(f"there is no session {session_id!r}")
            run = await repository.run(row.run_id)
            turns = await repository.turns_of(session_id)
            ledger = await repository.rewards_of([session_id])
            trainings = await repository.trainings_of([session_id])
        item = assembly.session_item(row)
        rewards = assembly.reward_items(ledger, assembly.used_by(trainings))
        return SessionView(
            session=item,
            run=run.name if run is not None else item.run_id,
            metadata=row._mapping["metadata"],
            trainability=assembly.trainability(item),
            trained=assembly.trained(item, trainings, rewards),
            turns=tuple(self._turn_view(turn, with_tokens) for turn in turns),
            rewards=tuple(rewards),
        )

    async def session_run(self, session_id: str) -> str:
        """The id of the session's run."""
        async with self._database.read() as connection:
            row = await OverviewRepository(connection).session(session_id)
        if row is None:
            raise NotFound(f"there is no session {session_id!r}")
        return str(row.run_id)

    async def turn(self, turn_id: str, *, with_tokens: bool = False) -> TurnView:
        async with self._database.read() as connection:
            row = await OverviewRepository(connection).turn(turn_id)
        if row is None:
            raise NotFound(f"there is no turn {turn_id!r}")
        return self._turn_view(row, with_tokens)

    def _turn_view(self, row: AnyRow, with_tokens: bool) -> TurnView:
        return assembly.turn_view(row, with_tokens=with_tokens, text=self._token_text)

    async def rewards(self, name_or_id: str, *, cursor: str | None = None, limit: int = 50) -> RewardPage:
        """The ledger, newest first. Raises InvalidRequest for a cursor that no page gave out."""
        run_id = await self.run_id(name_or_id)
        size = _page_size(limit)
        after = Cursor.decode(cursor) if cursor else None
        if after is not None and not after.key.isdecimal():
            raise InvalidRequest("cursor is not one that a page gave out", param="cursor")
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            rows = await repository.rewards(run_id, after=after, limit=size + 1)
            touched = sorted({row.session_id for row in rows[:size]})
            ledger = await repository.rewards_of(touched)
            trainings = await repository.trainings_of(touched)
        items = {item.id: item for item in assembly.reward_items(ledger, assembly.used_by(trainings))}
        last = rows[size - 1] if len(rows) > size else None
        return RewardPage(
            rewards=tuple(items[row.id] for row in rows[:size]),
            next_cursor=Cursor(at=last.created_at, key=str(last.sequence)).encode() if last is not None else None,
        )

    # Steps

    async def steps(self, name_or_id: str, *, cursor: str | None = None, limit: int = 50) -> StepPage:
        """Newest first. The cursor is the last version of the page before; raises InvalidRequest for another."""
        run_id = await self.run_id(name_or_id)
        size = _page_size(limit)
        if cursor is not None and not cursor.isdecimal():
            raise InvalidRequest("cursor is not one that a page gave out", param="cursor")
        below = int(cursor) if cursor else None
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            rows = await repository.versions(run_id, below=below, limit=size + 1)
            facts = await self._facts_of(repository, run_id, [row.version for row in rows[:size]])
        return StepPage(
            steps=tuple(assembly.step_item(row, facts[row.version]) for row in rows[:size]),
            next_cursor=str(rows[size - 1].version) if len(rows) > size else None,
        )

    async def step(self, name_or_id: str, version: int) -> StepView:
        run = await self._run_row(name_or_id)
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            row = await repository.version(run.id, version)
            if row is None:
                raise NotFound(f"the run {run.name!r} has no version {version}")
            audit = assembly.audit_of(row.audit)
            ids = [entry.session_id for entry in audit]
            now = await repository.reward_now(ids)
            then = {entry.session_id: entry.reward for entry in await repository.trainings_of(ids)}
        trajectories = tuple(
            StepTrajectory(
                audit=entry,
                reward_now=now.get(entry.session_id),
                revised=entry.session_id in then and then[entry.session_id] != now.get(entry.session_id),
            )
            for entry in audit
        )
        return StepView(
            step=assembly.step_item(row, assembly.step_facts(audit)),
            run=run.name,
            config_hash=row.config_hash,
            seed=row.seed,
            claim_ids=tuple(row.claim_ids),
            trajectories=trajectories,
            rewards_revised=sum(entry.revised for entry in trajectories),
        )

    # Live

    async def snapshot(self, run_id: str, *, after: int | None) -> Snapshot:
        """`after` None: with the last few events."""
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            run = await repository.run(run_id)
            if run is None:
                raise NotFound(f"there is no run {run_id!r}")
            limit = _FIRST_EVENTS if after is None else _MAX_EVENTS
            rows = await repository.events(run_id, after=after or 0, limit=limit)
        events = tuple(assembly.event_item(row) for row in reversed(rows))
        return Snapshot(
            run=await self._summary(run),
            events=events,
            last_event_id=events[-1].id if events else after or 0,
        )

    async def snapshots(self, run_id: str, *, after: int | None = None) -> AsyncIterator[Snapshot | None]:
        """A snapshot at once, then one whenever something changed; None, a sign of life, after 15 quiet seconds.

        Ends with `close`. Woken by the signals of this process; what another process changed is seen within a
        second.
        """
        last: Snapshot | None = None
        sent_at = time.monotonic()
        while not self._closed.is_set():
            snapshot = await self.snapshot(run_id, after=after)
            if last is None or snapshot.events or snapshot.run != last.run:
                last, after, sent_at = snapshot, snapshot.last_event_id, time.monotonic()
                yield snapshot
            elif time.monotonic() - sent_at >= _HEARTBEAT_S:
                sent_at = time.monotonic()
                yield None
            await self._change()

    async def _change(self) -> None:
        """Waits for a hint of a change, `_POLL_S` at most and `_GAP_S` at least, or for `close`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), _GAP_S)
            return
        signals = (self._signals.events, self._signals.versions, self._signals.trajectories)
        waits = [asyncio.ensure_future(signal.wait(_POLL_S - _GAP_S)) for signal in signals]
        waits.append(asyncio.ensure_future(self._closed.wait()))
        try:
            await asyncio.wait(waits, timeout=_POLL_S - _GAP_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # Health and keys

    async def health(self) -> Health:
        """Never raises: what does not work is in the answer."""
        problems: list[str] = []
        began = time.monotonic()
        runs: tuple[RunHealth, ...] = ()
        database = "ok"
        try:
            runs = await self._run_health()
        except StoreUnavailable as error:
            database = "down"
            problems.append(error.message)
        seconds = time.monotonic() - began
        engine_ready = self._swaps.engine_ready if self._swaps is not None else None
        if engine_ready is False:
            problems.append("the engine does not take calls: it is down, or does not hold a version of the run yet")
        disk = _disk(self._data_dir)
        if disk is not None and disk[1] < _LOW_DISK_BYTES:
            problems.append(f"only {disk[1] / 2**20:.0f} MiB are free on the disk of {self._data_dir}")
        problems.extend(
            f"no trainer was heard of for the run {run.name!r}, whose trajectories wait"
            for run in runs
            if run.trainer == "away"
        )
        return Health(
            ready=database == "ok" and engine_ready is not False,
            status="degraded" if problems else "ok",
            problems=tuple(problems),
            database=database,
            database_seconds=seconds,
            engine_ready=engine_ready,
            disk_free_bytes=disk[1] if disk is not None else None,
            disk_total_bytes=disk[0] if disk is not None else None,
            runs=runs,
            now=self._clock(),
        )

    async def _run_health(self) -> tuple[RunHealth, ...]:
        now = self._clock()
        async with self._database.read() as connection:
            repository = OverviewRepository(connection)
            found = []
            for run in await repository.runs():
                lease = RunSettings.model_validate(run.config).lease_seconds
                mark = await repository.trainer_marks(run.id)
                # A lease is granted or renewed for `lease` seconds from when the trainer was heard.
                seen_at = max(mark.created_at, mark.lease_expires_at - lease) if mark is not None else None
                waiting = await repository.oldest_ready(run.id)
                is_waiting = waiting is not None and now - waiting > lease and run.state == "active"
                if seen_at is not None and now - seen_at <= lease:
                    trainer = "active"
                elif is_waiting:
                    trainer = "away"
                else:
                    trainer = "idle" if seen_at is not None else "never"
                found.append(
                    RunHealth(
                        id=run.id,
                        name=run.name,
                        state=run.state,
                        head_version=run.head_version,
                        serving_version=run.serving_version,
                        trainer=trainer,
                        trainer_seen_at=seen_at,
                    )
                )
        return tuple(found)

    async def key_holder(self, key_id: str) -> KeyHolder | None:
        """Whose key this is; None once it is revoked."""
        async with self._database.read() as connection:
            row = await OverviewRepository(connection).key(key_id)
        if row is None or row.revoked_at is not None:
            return None
        return KeyHolder(key_id=row.id, kind=row.kind, run_id=row.run_id)


def _page_size(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def _disk(directory: Path | None) -> tuple[int, int] | None:
    """(total, free) bytes; None where nobody said which disk, or it cannot be asked."""
    if directory is None:
        return None
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    return usage.total, usage.free
