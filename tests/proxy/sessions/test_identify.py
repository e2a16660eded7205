"""Finding the session of a call by a name: names of one attempt, names that last, several processes."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from proxy.contract.identifiers import TurnId, new_session_id, new_turn_id
from proxy.contract.states import Outcome
from proxy.errors import NameUsed
from proxy.feedback.service import FeedbackItem
from proxy.sessions.identification import AttributedBy, SessionHints
from proxy.sessions.memory import FRESH_SECONDS
from proxy.sessions.opening import SessionSpec
from proxy.sessions.repository import ContextRow, SessionRepository
from proxy.settings import RunSettings
from tests.proxy.sessions.processes import (
    NAMES_OF_ATTEMPTS,
    NAMES_THAT_LAST,
    ONE,
    THREE,
    TWO,
    Proxy,
    by_name,
    goes_on,
    sessions,
    transactions,
)
from tests.proxy.store import open_store


async def test_names_are_one_namespace(proxy: Proxy) -> None:
    found = [await proxy.call(by_name(by, "mine")) for by in (*NAMES_OF_ATTEMPTS, *NAMES_THAT_LAST)]
    assert len({context.id for context in found}) == 1
    assert [context.attributed_by for context in found] == [*NAMES_OF_ATTEMPTS, *NAMES_THAT_LAST]
    assert [context.is_new for context in found] == [True] + [False] * (len(found) - 1)
    view = await proxy.sessions.get(proxy.store.owner, "mine")
    assert view.attributed_by == "path"


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("by", NAMES_OF_ATTEMPTS)
async def test_a_new_conversation_under_the_name_of_an_ended_attempt_opens_the_next(
    proxy: Proxy, by: AttributedBy, cold: bool
) -> None:
    first = await proxy.call(by_name(by, "attempt"))
    await proxy.answer(first, ONE)
    turn = TurnId(await proxy.store.add_turn(first.id, conversation_hash=TWO, settled_hash=THREE))
    await proxy.sessions.end(proxy.store.owner, first.id, Outcome.COMPLETED)
    asking = Proxy(proxy.store) if cold else proxy
    named = by_name(by, "attempt")
    for hints in (
        structs.replace(named, conversation_hashes=(b"x" * 16, ONE)),
        structs.replace(named, conversation_hashes=(THREE,)),
        structs.replace(named, turns=(new_turn_id(), turn)),
        structs.replace(named, repeats=lambda session_id: session_id == first.id),
    ):
        if cold and hints.repeats is not None:
            continue  # another process cannot know of it
        found = await asking.call(hints)
        assert (found.id, found.attempt, found.has_ended) == (first.id, 1, True)
    second = await asking.call(structs.replace(named, conversation_hashes=(b"x" * 16,), turns=(new_turn_id(),)))
    assert (second.id != first.id, second.is_new, second.attempt, second.has_ended) == (True, True, 2, False)
    assert (await proxy.call(named)).id == second.id if cold else True
    proxy.store.clock.now -= 1000  # the clock is set back: the numbers decide which attempt is the newest
    await asking.sessions.end(proxy.store.owner, second.id, Outcome.COMPLETED)
    third = await asking.call(named)
    assert (third.attempt, (await asking.sessions.get(proxy.store.owner, "attempt")).id) == (3, third.id)


async def test_calls_that_begin_the_next_attempt_at_once_share_it(proxy: Proxy) -> None:
    first = await proxy.call(by_name(AttributedBy.PATH, "attempt"))
    await proxy.sessions.end(proxy.store.owner, first.id, Outcome.COMPLETED)
    beside = Proxy(proxy.store)
    found = await asyncio.gather(
        *(asking.call(by_name(AttributedBy.PATH, "attempt")) for asking in (proxy, beside) for _ in range(4))
    )
    assert {(context.attempt, context.id) for context in found} == {(2, found[0].id)}
    assert [context.is_new for context in found].count(True) == 1


async def test_a_run_may_refuse_to_use_names_again(database_url: str) -> None:
    settings = RunSettings(name="policy", model="base/model", repeated_names="refuse")
    async with open_store(database_url, settings) as store:
        asking = Proxy(store)
        for by in NAMES_OF_ATTEMPTS:
            first = await asking.call(by_name(by, by))
            await store.sessions.end(store.owner, first.id, Outcome.COMPLETED)
            with pytest.raises(NameUsed, match="attempt 1") as refused:
                await Proxy(store).call(by_name(by, by))
            assert (refused.value.status, refused.value.code) == (410, "session_ended")
            await Proxy(store).call(by_name(AttributedBy.PROJECT, f"proj {by}"))


@pytest.mark.parametrize("by", NAMES_THAT_LAST)
async def test_a_name_that_lasts_opens_the_next_session_when_the_last_has_ended(
    proxy: Proxy, by: AttributedBy
) -> None:
    store = proxy.store
    first = await proxy.call(by_name(by, "alice"))
    assert (await proxy.call(by_name(by, "alice"))).id == first.id
    reward = FeedbackItem(entries=(("reward", 1.0),), session_id="alice")
    (receipt,) = await store.feedback.record(store.owner, [reward])
    assert receipt.session_id == first.id
    store.clock.now += 1
    second = await proxy.call(by_name(by, "alice"))
    assert (second.id != first.id, second.is_new, second.attributed_by) == (True, True, by)
    assert (await proxy.call(by_name(AttributedBy.HEADER, "alice"))).id == second.id, "the newest has the name"
    assert (await store.sessions.get(store.owner, "alice")).id == second.id
    (receipt,) = await store.feedback.record(store.owner, [reward])
    assert receipt.session_id == second.id
    assert (await store.sessions.get(store.owner, first.id)).state == "ended"


async def test_calls_that_reopen_a_name_at_once_share_the_session(proxy: Proxy) -> None:
    first = await proxy.call(by_name(AttributedBy.PROJECT, "alice"))
    await proxy.sessions.end(proxy.store.owner, first.id, Outcome.COMPLETED)
    found = await asyncio.gather(*(proxy.call(by_name(AttributedBy.PROJECT, "alice")) for _ in range(8)))
    assert len({context.id for context in found}) == 1
    assert [context.is_new for context in found].count(True) == 1
    assert await sessions(proxy.store) == 2


async def test_an_id_of_ours_is_always_that_session(proxy: Proxy) -> None:
    (created,) = await proxy.sessions.create(proxy.store.run, SessionSpec())
    await proxy.sessions.end(proxy.store.owner, created.id, Outcome.COMPLETED)
    for by in (*NAMES_OF_ATTEMPTS, *NAMES_THAT_LAST):
        assert (await proxy.call(by_name(by, created.id))).id == created.id
    unknown = new_session_id()
    opened = await proxy.call(by_name(AttributedBy.AGENT_HEADER, unknown))
    assert opened.id != unknown, "an agent's own id may look like ours: it is a name then"
    assert (await proxy.call(by_name(AttributedBy.METADATA, unknown))).id == opened.id


async def test_cached_sessions_need_no_query(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with transactions(proxy.store, monkeypatch) as opened:
        named = await proxy.call(by_name(AttributedBy.HEADER, "mine"))
        assert opened == ["commit"], "opening is one transaction"
        bare = await proxy.call(SessionHints())
        assert opened == ["commit", "commit"]
        proxy.sessions.answered(bare, ONE, seen_open=None)
        for hints in (by_name(AttributedBy.HEADER, "mine"), SessionHints(path=named.id), goes_on(ONE)):
            for _ in range(3):
                await proxy.call(hints)
        assert opened == ["commit", "commit"]


async def test_a_session_that_is_answered_stays_known(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    named = await proxy.call(by_name(AttributedBy.PROJECT, "alice"))
    for _ in range(3):
        proxy.store.clock.now += 10 * FRESH_SECONDS
        proxy.sessions.answered(named, ONE, seen_open=proxy.sessions.as_of_now())
        with transactions(proxy.store, monkeypatch) as opened:
            assert (await proxy.call(by_name(AttributedBy.PROJECT, "alice"))).id == named.id
            assert (await proxy.call(goes_on(ONE))).id == named.id
            assert opened == []
    look = proxy.sessions.as_of_now()
    await proxy.sessions.end(proxy.store.owner, named.id, Outcome.COMPLETED)
    proxy.sessions.answered(named, ONE, seen_open=look)
    assert (await proxy.call(by_name(AttributedBy.PROJECT, "alice"))).is_new, "it ended while the turn was recorded"


async def test_a_session_key_costs_one_look(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    (created,) = await proxy.sessions.create(proxy.store.run, SessionSpec())
    who = await proxy.store.credentials.authenticate(created.api_key)
    with transactions(proxy.store, monkeypatch) as opened:
        for _ in range(3):
            await proxy.sessions.identify(who, proxy.store.run, SessionHints())
            proxy.store.clock.now += 10 * FRESH_SECONDS
        assert opened == ["read"]


async def test_an_end_in_another_process_is_seen_within_a_second(proxy: Proxy) -> None:
    store, other = proxy.store, Proxy(proxy.store)
    first = await proxy.call(by_name(AttributedBy.PROJECT, "alice"))
    bare = await proxy.call(SessionHints())
    await proxy.answer(bare, ONE)
    for context in (first, bare):
        await other.sessions.end(store.owner, context.id, Outcome.COMPLETED)
    next_one = await other.call(by_name(AttributedBy.PROJECT, "alice"))
    assert next_one.id != first.id
    store.clock.now += FRESH_SECONDS
    assert (await proxy.call(by_name(AttributedBy.PROJECT, "alice"))).id == next_one.id
    assert (await proxy.call(by_name(AttributedBy.HEADER, "alice"))).id == next_one.id
    assert (await proxy.call(goes_on(ONE))).attributed_by is AttributedBy.NEW


async def test_records_of_another_process_are_found(proxy: Proxy) -> None:
    other = Proxy(proxy.store)
    named = await other.call(by_name(AttributedBy.PATH, "mine"))
    bare = await other.call(SessionHints())
    await other.answer(bare, ONE)
    assert (await proxy.call(by_name(AttributedBy.PROJECT, "mine"))).id == named.id
    assert (await proxy.call(goes_on(TWO, ONE))).id == bare.id
    await proxy.answer(bare, TWO)
    assert (await other.call(goes_on(TWO, ONE))).id == bare.id


async def test_a_name_that_another_process_opened_at_the_same_moment(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes look before either writes, as can happen on a database."""
    first = await Proxy(proxy.store).call(by_name(AttributedBy.HEADER, "race"))
    real, looked = SessionRepository.context, []

    def late(self: SessionRepository, *, name: str, run_id: str | None) -> ContextRow | None:
        looked.append(name)
        return None if len(looked) == 1 else real(self, name=name, run_id=run_id)

    monkeypatch.setattr(SessionRepository, "context", late)
    assert (await proxy.call(by_name(AttributedBy.HEADER, "race"))).id == first.id
    assert looked == ["race", "race"]
