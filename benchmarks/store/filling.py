"""Fill a database with turns through the proxy's services, as fast as they accept them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.store.workload import SessionPlan, Workload, stored_tokens
from proxy.auth.service import Credentials, Principal, PrincipalKind
from proxy.claims.service import ClaimService
from proxy.clock import system_clock
from proxy.contract.claim import ClaimRequest, CommitRequest, StepReport, TrajectoryAudit
from proxy.contract.identifiers import ClaimId, SessionId
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.database.migrate import upgrade
from proxy.database.unit_of_work import Database
from proxy.feedback.service import FeedbackItem, FeedbackService
from proxy.lifecycle.signals import Signals
from proxy.overview.service import OverviewService
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import AttributedBy, Name, SessionHints
from proxy.sessions.service import SessionService
from proxy.settings import RunSettings
from proxy.turns.service import TrajectoryStore
from proxy.versions.inspector import WeightsInspector
from proxy.versions.service import VersionService

AT_ONCE = 128
"""Concurrent sessions."""
BATCH = 128
"""Trajectories in a claim."""


@dataclass
class Filled:
    """Counts of what was written so far."""

    turns: int = 0
    sessions: int = 0
    tokens: int = 0
    seconds: float = 0.0
    long_sessions: list[str] = field(default_factory=list)
    """Some of the conversations with 50 turns."""


class Proxy:
    """The services of a proxy that use the store, without HTTP and without an engine."""

    def __init__(self, database: Database, weights: Path) -> None:
        clock, signals = system_clock, Signals()
        self.database = database
        self.runs = RunDirectory(database, clock)
        self.credentials = Credentials(database, b"s" * 32, clock)
        self.sessions = SessionService(database, self.runs, self.credentials, signals, clock)
        self.feedback = FeedbackService(database, signals, clock)
        self.store = TrajectoryStore(database=database, clock=clock, signals=signals)
        self.claims = ClaimService(database=database, clock=clock, signals=signals)
        self.versions = VersionService(
            database=database, clock=clock, signals=signals, inspector=WeightsInspector(weights.parent)
        )
        self.overview = OverviewService(database=database, clock=clock, signals=signals)
        self.weights = weights
        self.filled = Filled()
        self._names = iter(range(1 << 62))

    async def begin(self) -> None:
        self.run: RunView = await self.runs.ensure(RunSettings(name="policy", model="base/model"))
        key = await self.credentials.create(PrincipalKind.RUN, run_id=self.run.id)
        self.principal: Principal = await self.credentials.authenticate(key.text)

    async def fill(self, workload: Workload, turns: int, *, consumed_share: float = 0.5) -> None:
        """Add about `turns` turns in sessions that are opened, rewarded and ended. Meanwhile a trainer consumes
        the share `consumed_share` of them."""
        plans = workload.plans(turns)
        began = time.perf_counter()
        trainer = asyncio.create_task(self._consume(consumed_share))
        try:
            async with asyncio.TaskGroup() as agents:
                for _ in range(AT_ONCE):
                    agents.create_task(self._agent(workload, plans))
        finally:
            trainer.cancel()
            await asyncio.gather(trainer, return_exceptions=True)
        self.filled.seconds += time.perf_counter() - began

    async def claim(self) -> tuple[ClaimId | None, list[str]]:
        """Lease a batch and return its sessions."""
        batch = await self.claims.claim(self.run, ClaimRequest(trainer="bench", want=BATCH, max_staleness=1 << 30))
        return batch.claim_id, [trajectory.session_id for group in batch.groups for trajectory in group.trajectories]

    async def _agent(self, workload: Workload, plans: Iterator[SessionPlan]) -> None:
        for plan in plans:
            name = Name(AttributedBy.HEADER, f"attempt-{next(self._names)}")
            session = await self.sessions.identify(self.principal, self.run, SessionHints(named=name))
            head = self._head
            for record in workload.records(self.run.id, session.id, plan, version=head, clock=system_clock):
                await self.store.record(record)
                self.filled.turns += 1
                self.filled.tokens += stored_tokens(record)
            item = FeedbackItem(entries=(("reward", float(plan.turns % 2)),), session_id=session.id)
            await self.feedback.record(self.principal, [item])
            self.filled.sessions += 1
            if plan.turns > 40 and len(self.filled.long_sessions) < 500:
                self.filled.long_sessions.append(session.id)

    _head = 0
    _consumed = 0

    async def _consume(self, share: float) -> None:
        """Claim and commit like a trainer, whenever the share to consume allows another batch."""
        while True:
            while self._consumed + BATCH > share * self.filled.sessions:  # noqa: ASYNC110  (it looks now and then)
                await asyncio.sleep(0.02)
            claim_id, session_ids = await self.claim()
            if claim_id is None:
                continue
            await self._commit(claim_id, session_ids)
            self._consumed += len(session_ids)

    async def _commit(self, claim_id: ClaimId, session_ids: list[str]) -> None:
        audit = tuple(_audit(session_id) for session_id in session_ids)
        reply = await self.versions.commit(
            self.run,
            CommitRequest(
                claim_ids=(claim_id,),
                parent_version=self._head,
                weights=self._make_weights(),
                step=StepReport(config_hash="0" * 64, seed=0, metrics={"reward_mean": 0.5, "loss": 0.1}, audit=audit),
            ),
        )
        self._head = reply.version

    def _make_weights(self) -> WeightsReference:
        """Make a directory with as little content as a version may have, the same for all versions."""
        self.weights.mkdir(exist_ok=True)
        file, companion = self.weights / "model.safetensors", self.weights / "config.json"
        if not file.exists():
            file.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
            companion.write_text("{}")
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (file, companion)}
        return WeightsReference(
            uri=str(self.weights),
            format=WeightsFormat.HUGGINGFACE,
            sha256=files[file.name],
            bytes=file.stat().st_size,
            files=files,
        )


def _audit(session_id: str) -> TrajectoryAudit:
    return TrajectoryAudit(
        session_id=SessionId(session_id),
        reward=1.0,
        advantage=0.731,
        trained_tokens=412,
        staleness_mean=0.62,
        staleness_max=2,
        logprob_gap_mean=0.00123,
        logprob_gap_max=0.0456,
        ratio_min=0.812,
        ratio_median=1.0004,
        ratio_max=1.21,
        clipped_share=0.0121,
    )


@asynccontextmanager
async def open_proxy(url: str, directory: Path) -> AsyncIterator[Proxy]:
    """Open a proxy's services over a new database at `url`."""
    upgrade(url)
    database = Database(url, synchronous="normal" if url.startswith("sqlite") else None)  # as its figures were taken
    try:
        proxy = Proxy(database, directory / "weights")
        await proxy.begin()
        yield proxy
    finally:
        await database.aclose()
