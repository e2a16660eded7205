"""A store with one run, a clock that tests set, and short methods for what clients do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, insert, select, update

from proxy.auth.service import Principal, PrincipalKind
from proxy.contract.identifiers import (
    GroupId,
    KeyId,
    RunId,
    SessionId,
    TurnId,
    new_group_id,
    new_reward_id,
    new_session_id,
    new_turn_id,
)
from proxy.contract.states import EndReason, Outcome
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, Turn, TurnState, VersionSpan
from proxy.database.tables import Base, EventRow, GroupRow, RewardRow, RunRow, SessionRow
from proxy.database.unit_of_work import Database
from proxy.feedback.service import FeedbackItem, FeedbackService
from proxy.lifecycle.lifecycle import settle
from proxy.lifecycle.outcomes import Ending
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunDirectory, RunView
from proxy.settings import RunSettings
from proxy.turns.service import TrajectoryStore, TurnRecord
from tests.proxy.store import MovedClock


class World:
    """`run` is the run as of the start; `current_run` returns it with its present versions."""

    def __init__(self, database: Database, clock: MovedClock, run: RunView) -> None:
        self.database = database
        self.clock = clock
        self.run = run
        self.signals = Signals()
        self.runs = RunDirectory(database, clock)
        self.store = TrajectoryStore(database=database, clock=clock, signals=self.signals)

    @property
    def run_id(self) -> RunId:
        return self.run.id

    async def current_run(self) -> RunView:
        return await self.runs.by_id(self.run_id)

    async def group(self, *, size: int | None) -> GroupId:
        group_id = new_group_id()
        values = {"id": group_id, "run_id": self.run_id, "name": group_id, "size": size}
        await self.database.commit(
            lambda connection: connection.execute(insert(GroupRow).values(**values, created_at=self.clock()))
        )
        return group_id

    async def session(self, *, group: GroupId | None = None, purpose: str = "train") -> SessionId:
        session_id = new_session_id()
        await self.database.commit(
            lambda connection: connection.execute(
                insert(SessionRow).values(
                    id=session_id,
                    run_id=self.run_id,
                    group_id=group,
                    purpose=purpose,
                    attributed_by="created",
                    state="open",
                    training="excluded" if purpose == "eval" else "pending",
                    turn_count=0,
                    created_at=self.clock(),
                    last_active_at=self.clock(),
                )
            )
        )
        return session_id

    def record(self, session_id: SessionId, **changes: Any) -> TurnRecord:
        """Return a turn without a parent, or one that continues `parent` (a TurnRecord) with `prefix_tokens`."""
        return turn_record(self.run_id, session_id, now=self.clock(), **changes)

    async def turn(self, session_id: SessionId, **changes: Any) -> TurnRecord:
        record = self.record(session_id, **changes)
        await self.store.record(record)
        return record

    async def reward(
        self,
        session_id: SessionId,
        value: float,
        *,
        turn_id: TurnId | None = None,
        name: str = "reward",
        final: bool = True,
        after_training: bool = False,
    ) -> str:
        reward_id = new_reward_id()
        now = self.clock()

        def work(connection: Connection) -> None:
            connection.execute(
                insert(RewardRow).values(
                    id=reward_id,
                    run_id=self.run_id,
                    session_id=session_id,
                    turn_id=turn_id,
                    name=name,
                    value=value,
                    source="api",
                    after_training=after_training,
                    created_at=now,
                )
            )
            endings: dict[str, Ending] = {session_id: Ending(EndReason.REWARD)} if final else {}
            settle(connection, [session_id], now=now, endings=endings)

        await self.database.commit(work)
        self.signals.trajectories.notify()
        return reward_id

    async def end(self, session_id: SessionId, outcome: Outcome | None = None) -> None:
        now = self.clock()
        endings: dict[str, Ending] = {session_id: Ending(EndReason.EXPLICIT, outcome)}
        await self.database.commit(lambda connection: settle(connection, (), now=now, endings=endings))

    async def ready(self, value: float = 1.0, *, group: GroupId | None = None, version: int = 0) -> SessionId:
        """Create a session with one turn and a reward."""
        session_id = await self.session(group=group)
        await self.turn(session_id, version=version)
        await self.reward(session_id, value)
        return session_id

    async def hold_ready(self, *session_ids: SessionId) -> None:
        """Mark sessions as ready though they have nothing to train, as some in older stores are."""
        ready = {"training": "ready", "ready_at": self.clock()}
        await self.database.commit(
            lambda connection: connection.execute(
                update(SessionRow).where(SessionRow.id.in_(session_ids)).values(ready)
            )
        )

    async def session_row(self, session_id: SessionId) -> Any:
        statement = select(SessionRow.__table__).where(SessionRow.id == session_id)
        return await self.database.read(lambda connection: connection.execute(statement).one())

    async def text(
        self, session_id: SessionId, text: str, *, turn_id: TurnId | None = None, final: bool | None = None
    ) -> str:
        """Post a text about the session, or about its turn. Return the text's id."""
        admin = Principal(kind=PrincipalKind.ADMIN, key_id=KeyId("key"), run_id=None, session_id=None)
        feedback = FeedbackService(self.database, self.signals, self.clock)
        item = FeedbackItem(entries=(), session_id=session_id, turn_id=turn_id, text=text, final=final)
        (receipt,) = await feedback.record(admin, [item])
        return str(receipt.text)

    async def rows(self, table: type[Base]) -> list[Any]:
        """Return all rows of the table by their primary key: PostgreSQL keeps no order by itself."""
        rows = select(table.__table__).order_by(*table.__table__.primary_key)
        return await self.database.read(lambda connection: list(connection.execute(rows).all()))

    async def events(self, kind: str) -> list[dict[str, Any]]:
        return [row.data for row in await self.rows(EventRow) if row.kind == kind]

    async def set_run(self, **values: Any) -> None:
        await self.database.commit(lambda connection: connection.execute(update(RunRow).values(**values)))


@asynccontextmanager
async def open_world(url: str, *, clock: MovedClock | None = None, **settings: Any) -> AsyncIterator[World]:
    """Open a world in the migrated database `url` (`tests.database`), which may already contain one. `settings` are
    those of the run."""
    clock = clock or MovedClock()
    database = Database(url)
    try:
        run = await RunDirectory(database, clock).ensure(RunSettings(name="policy", model="base/model", **settings))
        yield World(database, clock, run)
    finally:
        await database.aclose()


def turn_record(
    run_id: RunId,
    session_id: SessionId,
    *,
    now: float,
    parent: TurnRecord | None = None,
    prefix_tokens: int = 0,
    prompt_ids: Sequence[int] = (1, 2, 3),
    output_ids: Sequence[int] = (4, 5),
    version: int = 0,
    temperature: float = 1.0,
    state: TurnState = TurnState.COMPLETE,
    finish_reason: FinishReason = FinishReason.STOP,
    conversation: str = "conversation",
    idempotency_key: str | None = None,
    messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "what is 2 + 2?"},),
) -> TurnRecord:
    spans = (VersionSpan(version=version, start=0, end=len(output_ids)),) if output_ids else ()
    turn = Turn(
        id=new_turn_id(),
        session_id=session_id,
        parent_id=None if parent is None else parent.turn.id,
        prefix_tokens=prefix_tokens,
        prompt_ids=tuple(prompt_ids),
        output_ids=tuple(output_ids),
        output_logprobs=(-0.5,) * len(output_ids),
        spans=spans,
        sampling=SamplingParameters(max_new_tokens=16, temperature=temperature),
        finish_reason=finish_reason,
        continuation=Continuation.NEW if parent is None else Continuation.EXACT,
        state=state,
        started_at=now,
        first_token_at=now,
        finished_at=now,
    )
    return TurnRecord(
        turn=turn,
        run_id=run_id,
        attributed_by="key",
        conversation_hash=conversation.encode().ljust(16, b"\0")[:16],
        tools_hash=b"\0" * 16,
        idempotency_key=idempotency_key,
        prompt_token_count=prefix_tokens + len(prompt_ids),
        messages=list(messages),
        request={"model": "policy"},
        response={"id": turn.id},
    )
