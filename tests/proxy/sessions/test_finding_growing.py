"""Finding the session of a call by its only message, which grew from an earlier one."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from proxy.auth.service import PrincipalKind
from proxy.contract.states import Outcome
from proxy.sessions.growing import LonePrompt
from proxy.sessions.identification import AttributedBy, SessionContext, SessionHints
from proxy.sessions.memory import FRESH_SECONDS
from tests.proxy.sessions.processes import (
    ONE,
    Proxy,
    transactions,
)

THOUGHT = "I look it up.\nAction: search[tests]"


def lone(text: str, frame: bytes = b"f") -> SessionHints:
    return SessionHints(lone_prompt=LonePrompt(frame, text))


async def step(proxy: Proxy, text: str, answer: str = THOUGHT) -> SessionContext:
    """Make a call with one user message, record its answer, and end it."""
    hints = lone(text)
    context = await proxy.call(hints)
    await proxy.store.add_turn(context.id)
    look = proxy.sessions.as_of_now()
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


async def test_equal_runs_with_equal_answers_continue_separately(proxy: Proxy) -> None:
    """They cannot be distinguished, but none gets two turns while another gets none."""
    proxy.store.clock.now += 1
    first = [await step(proxy, "Task") for _ in range(8)]
    proxy.store.clock.now += FRESH_SECONDS
    second = await asyncio.gather(*(proxy.call(lone(f"Task {THOUGHT} {number}")) for number in range(8)))
    assert sorted(context.id for context in second) == sorted(context.id for context in first)


async def test_a_prompt_of_an_ended_session_opens_another(proxy: Proxy) -> None:
    """This also holds if another process ended it, and if another run began alike."""
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
    # No public method shows the texts of answers in memory, and this test checks that they are gone.
    frames = proxy.sessions._growing._frames.values()
    assert [step.head for frame in frames for step in frame.steps.values()] == [THOUGHT] * (1 if asked_for else 2), (
        "the text of an answer goes with its session"
    )


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
