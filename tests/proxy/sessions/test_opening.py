"""Opening a session for a call that belongs to none."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from proxy.contract.identifiers import SessionId
from proxy.contract.states import Outcome
from proxy.sessions.identification import AttributedBy, SessionHints
from proxy.sessions.opening import SessionSpec
from proxy.sessions.repository import SessionRepository
from proxy.sessions.service import SessionService
from tests.proxy.sessions.processes import (
    Proxy,
    by_name,
    sessions,
)
from tests.proxy.store import Store


async def test_opened_sessions_are_counted_by_their_rule(store: Store) -> None:
    counted: list[str] = []

    class Observer:
        def session_opened(self, *, attributed_by: str, attempt: int) -> None:
            assert attempt == 1
            counted.append(attributed_by)

    service = SessionService(
        store.database, store.runs, store.credentials, store.signals, store.clock, observer=Observer()
    )
    await service.create(store.run, SessionSpec(), 2)
    for hints in (SessionHints(), by_name(AttributedBy.PROJECT, "alice"), by_name(AttributedBy.PROJECT, "alice")):
        await service.identify(store.owner, store.run, hints)
    assert counted == ["created", "created", "new", "project"]


async def test_an_idle_session_frees_a_name_that_lasts(proxy: Proxy) -> None:
    first = await proxy.call(by_name(AttributedBy.PROJECT, "alice"))
    proxy.store.clock.now += 901
    await proxy.sessions.sweep()
    assert (await proxy.call(by_name(AttributedBy.PROJECT, "alice"))).id != first.id
    assert isinstance(first.id, str)
    assert await sessions(proxy.store) == 2


async def test_a_group_is_joined_by_the_call_that_opens(proxy: Proxy) -> None:
    first = await proxy.call(SessionHints(path="a", group="task-1"))
    second = await proxy.call(SessionHints(path="b", group="task-1"))
    unmoved = await proxy.call(SessionHints(path="b", group="task-2"))
    assert first.group_id == second.group_id == unmoved.group_id
    assert SessionId(first.id) != second.id


async def test_calls_that_wait_together_open_sessions_as_one_by_one(proxy: Proxy) -> None:
    """Calls use new names, names that are open or ended, ids of our sessions, and none; some join groups."""
    known = await proxy.call(by_name(AttributedBy.HEADER, "known"))
    ended = await proxy.call(by_name(AttributedBy.PROJECT, "alice"))
    await proxy.store.sessions.end(proxy.store.owner, ended.id, Outcome.COMPLETED)
    hints = [
        *(by_name(AttributedBy.HEADER, f"attempt-{number}") for number in range(20)),
        *(SessionHints(path=f"member-{number}", group="task") for number in range(4)),
        *(by_name(AttributedBy.HEADER, "twice") for _ in range(2)),
        by_name(AttributedBy.HEADER, "known"),
        by_name(AttributedBy.PROJECT, "alice"),
        SessionHints(path=known.id),
        SessionHints(),
        SessionHints(),
    ]
    other = Proxy(proxy.store)  # its cache is empty
    found = await asyncio.gather(*(other.call(one) for one in hints))
    *named, twice, again, same, follower, by_id, first, second = found
    assert len({context.id for context in (*named, twice, follower, first, second, known, ended)}) == 30
    assert (again.id, same.id, by_id.id) == (twice.id, known.id, known.id)
    assert len({context.group_id for context in named[20:]}) == 1
    assert named[20].group_id is not None
    assert [await proxy.call(one) for one in hints[:24]] == [replace(one, is_new=False) for one in named]


async def test_postgresql_opens_sessions_that_wait_together_at_once(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not proxy.store.database.url.get_backend_name().startswith("postgresql"):
        pytest.skip("SQLite gains nothing by it")
    with monkeypatch.context() as patch:
        patch.setattr(SessionRepository, "context", None)  # the path of a single write
        opened = await asyncio.gather(
            *(proxy.call(by_name(AttributedBy.PROJECT, f"u{number}")) for number in range(20))
        )
    assert len({context.id for context in opened}) == await sessions(proxy.store) == 20
