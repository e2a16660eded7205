"""Finding the session of a call by the ids, the trace or the conversation that it continues."""

from __future__ import annotations

import asyncio

import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.identifiers import SessionId, TurnId, new_turn_id
from proxy.contract.states import Outcome
from proxy.feedback.service import FeedbackItem
from proxy.sessions.identification import AttributedBy, Name, SessionHints
from proxy.sessions.opening import SessionSpec
from proxy.settings import RunSettings
from tests.proxy.sessions.processes import (
    ONE,
    THREE,
    TWO,
    Proxy,
    by_name,
    goes_on,
    transactions,
)


async def test_a_conversation_of_a_named_session_continues_without_the_name(proxy: Proxy) -> None:
    named = await proxy.call(by_name(AttributedBy.HEADER, "mine"))
    await proxy.answer(named, ONE)
    found = await proxy.call(goes_on(ONE))
    assert (found.id, found.attributed_by) == (named.id, AttributedBy.CONVERSATION)
    (created,) = await proxy.sessions.create(proxy.store.run, SessionSpec())
    await proxy.store.add_turn(created.id, conversation_hash=TWO)
    assert (await proxy.call(goes_on(TWO))).is_new, "a session with a key of its own is called with that key"


@pytest.mark.parametrize("cold", [False, True])
async def test_an_id_decides_the_session_before_lasting_names(proxy: Proxy, cold: bool) -> None:
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


async def test_the_trace_decides_between_equal_conversations(proxy: Proxy) -> None:
    traces = [str(number) * 32 for number in range(1, 6)]
    opened = {}
    for trace in traces:
        context = opened[trace] = await proxy.call(SessionHints(trace=trace))
        await proxy.answer(context, ONE)
    for trace in traces:
        assert (await proxy.call(SessionHints(trace=trace, conversation_hashes=(ONE,)))).id == opened[trace].id


@pytest.mark.parametrize("cold", [False, True])
async def test_the_newest_open_session_of_equal_conversations_continues(proxy: Proxy, cold: bool) -> None:
    """An attempt that crashed stays open; the next one, equal so far, does not join it."""
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
async def test_parallel_equal_conversations_continue_separately(proxy: Proxy, cold: bool) -> None:
    """The first prompt and answer are equal, and the continuing calls are made at the same time."""
    opened = [await proxy.call(SessionHints()) for _ in range(3)]
    for context in opened:
        await proxy.answer(context, ONE)
        proxy.store.clock.now += 0.01
    after = Proxy(proxy.store) if cold else proxy
    found = await asyncio.gather(*(after.call(goes_on(ONE)) for _ in range(3)))
    assert {context.id for context in found} == {context.id for context in opened}
    assert {context.attributed_by for context in found} == {AttributedBy.CONVERSATION}


async def test_the_longest_conversation_decides_even_if_its_session_has_ended(proxy: Proxy) -> None:
    """Two attempts at one task began alike. One has ended, and a call that continues its end is not the other's."""
    going, ended = [await proxy.call(SessionHints()) for _ in range(2)]
    for context in (going, ended):
        await proxy.answer(context, ONE)
    await proxy.answer(ended, TWO)
    await proxy.sessions.end(proxy.store.owner, ended.id, Outcome.COMPLETED)
    for asking in (proxy, Proxy(proxy.store)):
        trailing = await asking.call(goes_on(TWO, ONE))
        assert (trailing.is_new, trailing.attributed_by) == (True, AttributedBy.NEW)
    assert (await proxy.call(goes_on(THREE, ONE))).id == going.id


async def test_a_conversation_continues_in_a_new_session_after_the_final_reward(proxy: Proxy) -> None:
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


async def test_failed_turns_are_not_part_of_a_conversation(proxy: Proxy) -> None:
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
