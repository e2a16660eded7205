"""A store on a real database, with the services that every domain needs and a clock that tests set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from proxy.auth.service import Credentials, Principal, PrincipalKind
from proxy.contract.arrays import pack_ids
from proxy.contract.identifiers import new_turn_id
from proxy.database.tables import RewardRow, SessionRow, TurnRow
from proxy.database.unit_of_work import Database
from proxy.feedback.service import FeedbackService
from proxy.lifecycle.signals import Signals
from proxy.limits.service import Limits
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.service import SessionService
from proxy.settings import RunSettings


class MovedClock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class SeenLimits:
    """An observer that collects refused limits."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def call_limited(self, *, limit: str, run: str) -> None:
        assert run
        self.refused.append(limit)


@dataclass
class Store:
    """`run` has the settings given to `open_store`; `owner` is the principal of a run key."""

    database: Database
    signals: Signals
    clock: MovedClock
    runs: RunDirectory
    credentials: Credentials
    sessions: SessionService
    feedback: FeedbackService
    limits: Limits
    limited: SeenLimits
    run: RunView
    owner: Principal

    async def principal(self, kind: PrincipalKind, *, run_id: str | None, session_id: str | None = None) -> Principal:
        key = await self.credentials.create(kind, run_id=run_id, session_id=session_id)
        return await self.credentials.authenticate(key.text)

    async def add_turn(
        self,
        session_id: str,
        *,
        conversation_hash: bytes = b"\0" * 16,
        at: float | None = None,
        state: str = "complete",
        settled_hash: bytes | None = None,
    ) -> str:
        """Insert a finished turn, as `TrajectoryStore` would record it."""
        turn_id = new_turn_id()
        now = self.clock() if at is None else at

        def work(connection: Connection) -> None:
            session = connection.execute(
                select(SessionRow.run_id, SessionRow.turn_count).where(SessionRow.id == session_id)
            ).one()
            connection.execute(
                insert(TurnRow).values(
                    id=turn_id,
                    run_id=session.run_id,
                    session_id=session_id,
                    ordinal=session.turn_count,
                    prefix_tokens=0,
                    prompt_ids=pack_ids((1,)),
                    output_ids=pack_ids((2, 3)),
                    output_logprobs=b"\0" * 8,
                    spans=[[0, 0, 2]],
                    sampling={"max_new_tokens": 8},
                    finish_reason="stop",
                    continuation="new",
                    state=state,
                    attributed_by="key",
                    conversation_hash=conversation_hash,
                    settled_hash=settled_hash,
                    tools_hash=b"\0" * 16,
                    prompt_token_count=1,
                    messages=[],
                    request={},
                    response={},
                    started_at=now,
                    finished_at=now,
                )
            )
            connection.execute(
                update(SessionRow)
                .where(SessionRow.id == session_id)
                .values(turn_count=SessionRow.turn_count + 1, last_active_at=now)
            )

        await self.database.commit(work)
        return turn_id

    async def set_session(self, session_id: str, **values: object) -> None:
        """Set columns of a session as claims and commits would."""
        await self.database.commit(
            lambda connection: connection.execute(
                update(SessionRow).where(SessionRow.id == session_id).values(**values)
            )
        )

    async def training(self, session_id: str) -> str:
        statement = select(SessionRow.training).where(SessionRow.id == session_id)
        return await self.database.read(lambda connection: connection.execute(statement).scalar_one())

    async def reward_values(self, session_id: str) -> list[float]:
        """Return the values of a session's rewards, in order of arrival."""
        statement = select(RewardRow.value).where(RewardRow.session_id == session_id).order_by(RewardRow.sequence)
        return await self.database.read(lambda connection: list(connection.execute(statement).scalars()))


@asynccontextmanager
async def open_store(
    url: str, settings: RunSettings | None = None, *, outlive_store: bool = False
) -> AsyncIterator[Store]:
    """Open a store in the migrated database `url` (`tests.database`). `outlive_store` is passed to its
    credentials."""
    database = Database(url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.aclose)
        clock = MovedClock()
        signals = Signals()
        runs = RunDirectory(database, clock)
        credentials = Credentials(database, b"s" * 32, clock, outlive_store=outlive_store)
        run = await runs.ensure(settings or RunSettings(name="policy", model="base/model"))
        key = await credentials.create(PrincipalKind.RUN, run_id=run.id)
        limited = SeenLimits()
        limits = Limits(database, clock, observer=limited)
        stack.push_async_callback(limits.aclose)
        yield Store(
            database=database,
            signals=signals,
            clock=clock,
            runs=runs,
            credentials=credentials,
            sessions=SessionService(database, runs, credentials, signals, clock, limits=limits),
            feedback=FeedbackService(database, signals, clock),
            limits=limits,
            limited=limited,
            run=run,
            owner=await credentials.authenticate(key.text),
        )
