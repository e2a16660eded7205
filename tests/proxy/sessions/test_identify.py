"""Which session a call belongs to, on a real store: names that end, names that last, conversations, two proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from sqlalchemy import func, select

from proxy.auth.service import PrincipalKind
from proxy.contract.identifiers import SessionId, TurnId, new_session_id, new_turn_id
from proxy.contract.states import Outcome
from proxy.database.tables import SessionRow
from proxy.errors import NameUsed
from proxy.feedback.service import FeedbackItem
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunDirectory
from proxy.sessions.growing import LonePrompt
from proxy.sessions.identification import AttributedBy, Name, SessionContext, SessionHints
from proxy.sessions.memory import FRESH_SECONDS
from proxy.sessions.opening import SessionSpec
from proxy.sessions.repository import ContextRow, SessionRepository
from proxy.sessions.service import SessionService
from proxy.settings import RunSettings
from tests.proxy.store import Store, open_store

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16

NAMES_OF_ATTEMPTS = [AttributedBy.PATH, AttributedBy.HEADER, AttributedBy.AGENT_HEADER]
NAMES_THAT_LAST = [by for by in AttributedBy if by.outlives_sessions]


def by_name(by: AttributedBy, text: str) -> SessionHints:
    return SessionHints(path=text) if by is AttributedBy.PATH else SessionHints(named=Name(by, text))


def goes_on(*hashes: bytes) -> SessionHints:
    return SessionHints(conversation_hashes=hashes)


class Proxy:
    """A process of its own on the store: another service with its own memory."""

    def __init__(self, store: Store) -> None:
        self.store = store
        signals = Signals()
        runs = RunDirectory(store.database, store.clock)
        self.sessions = SessionService(store.database, runs, store.credentials, signals, store.clock)

    async def call(self, hints: SessionHints) -> SessionContext:
        return await self.sessions.identify(self.store.owner, self.store.run, hints)

    async def answer(self, context: SessionContext, conversation: bytes) -> None:
        await self.store.add_turn(context.id, conversation_hash=conversation)
        self.sessions.answered(context, conversation, seen_open=None)


@pytest.fixture
def proxy(store: Store) -> Proxy:
    proxy = Proxy(store)
    proxy.sessions = store.sessions
    return proxy


@contextmanager
def transactions(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is opened on the store meanwhile."""
    opened: list[str] = []

    def counting(kind: str) -> Any:
        real = getattr(store.database, kind)

        def count(*work: Any, **about: Any) -> Any:
            opened.append(kind)
            return real(*work, **about)

        return count

    with monkeypatch.context() as patch:
        for kind in ("read", "commit"):
            patch.setattr(store.database, kind, counting(kind))
        yield opened


async def sessions(store: Store) -> int:
    return await store.database.read(
        lambda connection: connection.execute(select(func.count()).select_from(SessionRow)).scalar_one()
    )


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
    proxy.store.clock.now -= 1000  # the clock is set back: the numbers say which attempt is the newest
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


async def test_what_memory_knows_costs_no_look_at_the_store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
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
        proxy.sessions.answered(named, ONE, seen_open=proxy.sessions.look())
        with transactions(proxy.store, monkeypatch) as opened:
            assert (await proxy.call(by_name(AttributedBy.PROJECT, "alice"))).id == named.id
            assert (await proxy.call(goes_on(ONE))).id == named.id
            assert opened == []
    look = proxy.sessions.look()
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


async def test_what_another_process_recorded_is_found(proxy: Proxy) -> None:
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
    """As on a database where both look before either writes."""
    first = await Proxy(proxy.store).call(by_name(AttributedBy.HEADER, "race"))
    real, looked = SessionRepository.context, []

    def late(self: SessionRepository, *, name: str, run_id: str | None) -> ContextRow | None:
        looked.append(name)
        return None if len(looked) == 1 else real(self, name=name, run_id=run_id)

    monkeypatch.setattr(SessionRepository, "context", late)
    assert (await proxy.call(by_name(AttributedBy.HEADER, "race"))).id == first.id
    assert looked == ["race", "race"]


async def test_a_conversation_of_a_named_session_goes_on_without_the_name(proxy: Proxy) -> None:
    named = await proxy.call(by_name(AttributedBy.HEADER, "mine"))
    await proxy.answer(named, ONE)
    found = await proxy.call(goes_on(ONE))
    assert (found.id, found.attributed_by) == (named.id, AttributedBy.CONVERSATION)
    (created,) = await proxy.sessions.create(proxy.store.run, SessionSpec())
    await proxy.store.add_turn(created.id, conversation_hash=TWO)
    assert (await proxy.call(goes_on(TWO))).is_new, "a session with a key of its own is called with that key"


@pytest.mark.parametrize("cold", [False, True])
async def test_an_id_that_comes_back_names_the_session_before_names_that_last(proxy: Proxy, cold: bool) -> None:
    opened = [await proxy.call(SessionHints()) for _ in range(2)]
    turns = []
    for context in opened:
        turns.append(TurnId(await proxy.store.add_turn(context.id, conversation_hash=ONE)))
        proxy.sessions.answered(context, ONE, turn_id=turns[-1], seen_open=None)
    asking = Proxy(proxy.store) if cold else proxy
    for hints in (
        SessionHints(turns=(turns[0],), conversation_hashes=(ONE,)),
        SessionHints(turns=(new_turn_id(), turns[0], turns[1])),
        SessionHints(turns=(turns[0],), named=Name(AttributedBy.PROJECT, "proj"), trace="t" * 32),
    ):
        found = await asking.call(hints)
        assert (found.id, found.attributed_by) == (opened[0].id, AttributedBy.ANSWER_ID)
    by_header = SessionHints(turns=(turns[0],), named=Name(AttributedBy.HEADER, "mine"))
    assert (await asking.call(by_header)).attributed_by is AttributedBy.HEADER
    previous = await asking.call(SessionHints(turns=(turns[1], turns[0]), by_previous=True))
    assert (previous.id, previous.attributed_by) == (opened[1].id, AttributedBy.PREVIOUS_RESPONSE)


async def test_ids_that_are_invented_failed_or_of_another_run_name_nothing(proxy: Proxy) -> None:
    store = proxy.store
    context = await proxy.call(SessionHints())
    failed = TurnId(await store.add_turn(context.id, state="failed"))
    other_run = await store.runs.ensure(RunSettings(name="other", model="base/model"))
    other_key = await store.principal(PrincipalKind.RUN, run_id=other_run.id)
    elsewhere = await store.sessions.identify(other_key, other_run, SessionHints())
    foreign = TurnId(await store.add_turn(elsewhere.id))
    store.sessions.answered(elsewhere, ONE, turn_id=foreign, seen_open=None)
    found = await proxy.call(SessionHints(turns=(failed, foreign, new_turn_id(), TurnId("turn_x"))))
    assert (found.is_new, found.attributed_by) == (True, AttributedBy.NEW)


async def test_an_id_of_an_ended_session_opens_a_new_one_and_no_equal_one_takes_the_call(proxy: Proxy) -> None:
    going, ended = [await proxy.call(SessionHints()) for _ in range(2)]
    for context in (going, ended):
        turn = TurnId(await proxy.store.add_turn(context.id, conversation_hash=ONE))
        proxy.sessions.answered(context, ONE, turn_id=turn, seen_open=None)
    await proxy.sessions.end(proxy.store.owner, ended.id, Outcome.COMPLETED)
    for asking in (proxy, Proxy(proxy.store)):
        found = await asking.call(SessionHints(turns=(turn,), conversation_hashes=(ONE,)))
        assert (found.is_new, found.attributed_by) == (True, AttributedBy.NEW)
    await proxy.answer(found, TWO)
    again = await proxy.call(SessionHints(turns=(turn,), conversation_hashes=(TWO, ONE)))
    assert again.id == found.id, "what goes on from the new session's answer is the new session's"


async def test_a_looked_up_turn_costs_one_query_and_a_known_one_none(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = await proxy.call(SessionHints())
    turn = TurnId(await proxy.store.add_turn(context.id))
    hints = SessionHints(turns=(new_turn_id(), turn))
    with transactions(proxy.store, monkeypatch) as opened:
        for _ in range(2):
            assert (await proxy.call(hints)).id == context.id
        assert opened == ["read", "read"], "an unknown id in front may be another process's"
        for _ in range(3):
            await proxy.call(SessionHints(turns=(turn,)))
        assert opened == ["read", "read"]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_trace_that_is_unknown_joins_the_conversation(proxy: Proxy, cold: bool) -> None:
    first = await proxy.call(SessionHints(trace="1" * 32))
    assert (first.is_new, first.attributed_by) == (True, AttributedBy.TRACEPARENT)
    await proxy.answer(first, ONE)
    asking = Proxy(proxy.store) if cold else proxy
    second = await asking.call(SessionHints(trace="2" * 32, conversation_hashes=(ONE,)))
    assert (second.id, second.attributed_by) == (first.id, AttributedBy.CONVERSATION)
    beside = await asking.call(SessionHints(trace="1" * 32))
    assert (beside.id, beside.attributed_by) == (first.id, AttributedBy.TRACEPARENT)


async def test_of_equal_conversations_the_trace_finds_its_own(proxy: Proxy) -> None:
    traces = [str(number) * 32 for number in range(1, 6)]
    opened = {}
    for trace in traces:
        context = opened[trace] = await proxy.call(SessionHints(trace=trace))
        await proxy.answer(context, ONE)
    for trace in traces:
        assert (await proxy.call(SessionHints(trace=trace, conversation_hashes=(ONE,)))).id == opened[trace].id


@pytest.mark.parametrize("cold", [False, True])
async def test_of_equal_conversations_the_newest_that_is_open_goes_on(proxy: Proxy, cold: bool) -> None:
    """An attempt that crashed stays open: the next one, equal so far, does not join it."""
    crashed: list[SessionId] = []
    newest: list[SessionId] = []
    ended: list[SessionId] = []
    for kind in (crashed, newest, ended):
        context = await proxy.call(SessionHints())
        await proxy.answer(context, ONE)
        kind.append(context.id)
        proxy.store.clock.now += 1
    await proxy.sessions.end(proxy.store.owner, ended[0], Outcome.COMPLETED)
    asking = Proxy(proxy.store) if cold else proxy
    found = await asking.call(goes_on(ONE))
    assert [found.id] == newest
    asking.sessions.call_ended(found, recorded=False)
    assert [(await asking.call(goes_on(ONE))).id] == newest, "an attempt that failed does not count"


@pytest.mark.parametrize("cold", [False, True])
async def test_equal_conversations_in_parallel_go_on_apart(proxy: Proxy, cold: bool) -> None:
    """Same first prompt, same answer, and the calls that go on are under way at the same time."""
    opened = [await proxy.call(SessionHints()) for _ in range(3)]
    for context in opened:
        await proxy.answer(context, ONE)
        proxy.store.clock.now += 0.01
    after = Proxy(proxy.store) if cold else proxy
    found = await asyncio.gather(*(after.call(goes_on(ONE)) for _ in range(3)))
    assert {context.id for context in found} == {context.id for context in opened}
    assert {context.attributed_by for context in found} == {AttributedBy.CONVERSATION}


async def test_the_longest_conversation_decides_even_if_its_session_has_ended(proxy: Proxy) -> None:
    """Two attempts at one task that began alike. One has ended; what goes on from its end is not the other's."""
    going, ended = [await proxy.call(SessionHints()) for _ in range(2)]
    for context in (going, ended):
        await proxy.answer(context, ONE)
    await proxy.answer(ended, TWO)
    await proxy.sessions.end(proxy.store.owner, ended.id, Outcome.COMPLETED)
    for asking in (proxy, Proxy(proxy.store)):
        trailing = await asking.call(goes_on(TWO, ONE))
        assert (trailing.is_new, trailing.attributed_by) == (True, AttributedBy.NEW)
    assert (await proxy.call(goes_on(THREE, ONE))).id == going.id


async def test_a_conversation_goes_on_in_a_new_session_after_the_final_reward(proxy: Proxy) -> None:
    store = proxy.store
    first = await proxy.call(SessionHints())
    await proxy.answer(first, ONE)
    await store.feedback.record(store.owner, [FeedbackItem(entries=(("reward", 1.0),), session_id=first.id)])
    second = await proxy.call(goes_on(ONE))
    assert (second.is_new, second.id != first.id) == (True, True)
    await proxy.answer(second, TWO)
    assert (await proxy.call(goes_on(TWO, ONE))).id == second.id, "and on in that one"


@pytest.mark.parametrize("cold", [False, True])
async def test_a_conversation_is_found_without_the_message_that_floated_behind_it(proxy: Proxy, cold: bool) -> None:
    nearly, exactly = [await proxy.call(SessionHints()) for _ in range(2)]
    await proxy.store.add_turn(nearly.id, conversation_hash=ONE, settled_hash=TWO)
    proxy.sessions.answered(nearly, ONE, settled_hash=TWO, seen_open=None)
    asking = Proxy(proxy.store) if cold else proxy
    assert (await asking.call(goes_on(TWO))).id == nearly.id
    await proxy.answer(exactly, TWO)
    asking = Proxy(proxy.store) if cold else proxy
    assert [(await asking.call(goes_on(TWO))).id for _ in range(2)] == [exactly.id] * 2, "as it is, before that"
    assert (await asking.call(goes_on(ONE))).id == nearly.id


async def test_failed_turns_are_no_conversation(proxy: Proxy) -> None:
    context = await proxy.call(SessionHints())
    await proxy.store.add_turn(context.id, conversation_hash=ONE, state="failed")
    assert (await proxy.call(goes_on(ONE))).is_new


async def test_a_stranger_to_the_conversation_opens_a_session(proxy: Proxy) -> None:
    store = proxy.store
    context = await proxy.call(SessionHints())
    await proxy.answer(context, ONE)
    stranger = await store.principal(PrincipalKind.RUN, run_id=store.run.id)
    found = await proxy.sessions.identify(stranger, store.run, goes_on(ONE))
    assert found.is_new


async def test_long_conversations_are_found_by_any_of_their_answers(proxy: Proxy) -> None:
    context = await proxy.call(SessionHints())
    await proxy.answer(context, ONE)
    unknown = tuple(index.to_bytes(16, "big") for index in range(200))
    assert (await Proxy(proxy.store).call(goes_on(*unknown, ONE))).id == context.id


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
    """By new names, names that are known or ended, names of sessions of ours, and none; some join groups."""
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
    other = Proxy(proxy.store)  # which remembers nothing of them
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
        patch.setattr(SessionRepository, "context", None)  # the way of one alone
        opened = await asyncio.gather(
            *(proxy.call(by_name(AttributedBy.PROJECT, f"u{number}")) for number in range(20))
        )
    assert len({context.id for context in opened}) == await sessions(proxy.store) == 20


THOUGHT = "I look it up.\nAction: search[tests]"


def lone(text: str, frame: bytes = b"f") -> SessionHints:
    return SessionHints(lone_prompt=LonePrompt(frame, text))


async def step(proxy: Proxy, text: str, answer: str = THOUGHT) -> SessionContext:
    """A call of one user message, its answer and its end."""
    hints = lone(text)
    context = await proxy.call(hints)
    await proxy.store.add_turn(context.id)
    look = proxy.sessions.look()
    proxy.sessions.answered(context, text.encode(), lone_prompt=hints.lone_prompt, answer=answer, seen_open=look)
    proxy.sessions.call_ended(context, recorded=True)
    return context


async def test_a_prompt_that_grew_by_the_answer_stays_in_its_session(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await step(proxy, "Task")
    other = await step(proxy, "Task", answer="I think about it.\nAction: think[hard]")
    second = await step(proxy, f"Task {THOUGHT}\nObservation: none", answer="short")
    third = await step(proxy, f"Task {THOUGHT}\nObservation: none short\nObservation: 2")
    assert [context.id for context in (second, third)] == [first.id] * 2
    assert [context.attributed_by for context in (first, second)] == [AttributedBy.NEW, AttributedBy.CONVERSATION]
    assert other.id != first.id
    with transactions(proxy.store, monkeypatch) as opened:
        await proxy.call(lone(f"Task {THOUGHT} on"))
        assert opened == [], "what memory knows costs no query"
        proxy.store.clock.now += FRESH_SECONDS
        await proxy.call(lone(f"Task {THOUGHT} on"))
        assert opened == ["read"], "one, whether the session is still open"
        await proxy.call(lone("What is 1 + 1"))
        assert opened == ["read", "commit"], "no query looks for what is not known"


async def test_prompts_that_only_begin_alike_are_apart(proxy: Proxy) -> None:
    first = await step(proxy, "What is 1 + 1", answer="2")
    second = await step(proxy, "What is 1 + 12", answer="That is 13, I think.")
    third = await step(proxy, "What is 1 + 123")
    assert len({context.id for context in (first, second, third)}) == 3
    assert (await proxy.call(lone(f"What is 1 + 123 {THOUGHT}", b"other tools"))).is_new
    foreign = await proxy.store.principal(PrincipalKind.RUN, run_id=proxy.store.run.id)
    hints = lone(f"What is 1 + 123 {THOUGHT}")
    assert (await proxy.sessions.identify(foreign, proxy.store.run, hints)).is_new
    assert (await Proxy(proxy.store).call(hints)).is_new, "another process does not know the texts"
    assert (await proxy.call(hints)).id == third.id


async def test_equal_runs_with_equal_answers_go_on_apart(proxy: Proxy) -> None:
    """They cannot be told apart, but none takes two turns while another takes none."""
    proxy.store.clock.now += 1
    first = [await step(proxy, "Task") for _ in range(8)]
    proxy.store.clock.now += FRESH_SECONDS
    second = await asyncio.gather(*(proxy.call(lone(f"Task {THOUGHT} {number}")) for number in range(8)))
    assert sorted(context.id for context in second) == sorted(context.id for context in first)


async def test_a_prompt_of_an_ended_session_opens_another(proxy: Proxy) -> None:
    """As a conversation does; also if the end was another process's, and if another run began alike."""
    ended = await step(proxy, "Task")
    longer = await step(proxy, f"Task {THOUGHT} on")
    assert longer.id == ended.id
    beside = await step(proxy, "Task")
    await Proxy(proxy.store).sessions.end(proxy.store.owner, ended.id, Outcome.COMPLETED)
    proxy.store.clock.now += FRESH_SECONDS
    assert (await proxy.call(lone(f"Task {THOUGHT} on {THOUGHT}"))).is_new
    assert (await proxy.call(lone(f"Task {THOUGHT} else"))).id == beside.id, "an open one goes before ended ones"


@pytest.mark.parametrize("asked_for", [True, False])
async def test_an_erased_session_takes_no_prompt_that_grew(proxy: Proxy, asked_for: bool) -> None:
    first, other = await step(proxy, "Task"), await step(proxy, "Other")
    await proxy.store.set_session(first.id, erased_at=proxy.store.clock())
    proxy.store.signals.erasures.notify([first.id])
    if asked_for:
        proxy.store.signals.requested_erasures.notify([first.id])
    assert (await proxy.call(lone(f"Task {THOUGHT} on"))).is_new
    assert (await proxy.call(lone(f"Other {THOUGHT} on"))).id == other.id
    kept = [step.head for steps in proxy.sessions._growing._frames.values() for step in steps.values()]
    assert kept == [THOUGHT] * (1 if asked_for else 2), "the text of an answer goes with its session"


async def test_the_trace_chooses_among_equal_prompts(proxy: Proxy) -> None:
    opened = []
    for trace in ("a" * 32, "b" * 32):
        hints = structs.replace(lone("Task"), trace=trace)
        context = await proxy.call(hints)
        proxy.sessions.answered(context, ONE, lone_prompt=hints.lone_prompt, answer=THOUGHT, seen_open=None)
        opened.append(context)
    for context, trace in zip(opened, ("a" * 32, "b" * 32), strict=True):
        found = await proxy.call(structs.replace(lone(f"Task {THOUGHT} on"), trace=trace))
        assert (found.id, found.attributed_by) == (context.id, AttributedBy.CONVERSATION)
