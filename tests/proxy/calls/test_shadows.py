"""Shadow answers, from the call that they belong to until the trainer compares them with its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from proxy.calls.shadows import is_drawn
from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import new_turn_id
from proxy.database.tables import JobRow
from proxy.engines.protocol import GenerateRequest
from proxy.errors import EngineUnavailable
from proxy.feedback.service import FeedbackItem
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.agents import Agent, user
from tests.proxy.calls.world import USER, World, open_world, output_ids, until

Shadowed = Callable[..., AbstractAsyncContextManager[World]]
ANSWERS = ("It is 42.", "It is 41.", "It is 43.", "It is 44.")


@pytest.fixture
def shadowed(database_url: str, tmp_path: Path, template: ChatTemplate) -> Shadowed:
    """A world whose run has shadow answers, on both databases; other settings of the run by name."""

    @asynccontextmanager
    async def opened(run: dict[str, Any] | None = None, **shadow: Any) -> AsyncIterator[World]:
        settings = {"shadow": {"share": 1.0, "samples": 3, **shadow}, **(run or {})}
        async with open_world(tmp_path, template, settings, url=database_url) as world:
            world.say(*ANSWERS)
            yield world

    return opened


def seen(world: World) -> list[str]:
    return [turn.state.value for turn, _ in world.seen.turns]


async def real_and_shadows(world: World) -> tuple[Any, list[Any]]:
    """Return the turn of the only call, and its shadow answers. Ids made in one millisecond have no order."""
    turns = await world.turns()
    (real,) = [turn for turn in turns if turn.request_of is None]
    return real, [turn for turn in turns if turn.request_of is not None]


async def all_done(world: World, turns: int, dropped: int = 0) -> None:
    """Wait until so many turns are recorded and so many shadow answers dropped."""
    await until(lambda: (len(world.seen.turns), len(world.seen.dropped)) == (turns, dropped))


async def test_a_call_gets_shadow_answers_that_its_client_does_not_see(shadowed: Shadowed) -> None:
    async with shadowed() as world:
        response = await world.post({})
        assert response.json()["choices"][0]["message"]["content"] == ANSWERS[0]
        assert len(response.json()["choices"]) == 1
        await all_done(world, 4)
        real, shadows = await real_and_shadows(world)
        assert (real.state, real.request_of) == ("complete", None)
        for shadow in shadows:
            assert (shadow.state, shadow.request_of, shadow.request) == ("shadow", real.id, None)
            for same in ("session_id", "parent_id", "prefix_tokens", "prompt_ids", "started_at", "messages"):
                assert getattr(shadow, same) == getattr(real, same), same
        spoken = {world.template.decode(output_ids(turn)[:-1]) for turn in (real, *shadows)}
        assert spoken == set(ANSWERS)
        (session,) = await world.sessions()
        assert session.turn_count == 4


async def test_a_conversation_goes_on_from_the_answer_even_if_a_shadow_answer_is_the_same(
    shadowed: Shadowed,
) -> None:
    async with shadowed() as world:
        world.say("It is 42.")
        agent = Agent(world, USER)
        await agent.ask()
        await all_done(world, 4)
        for restarts in (False, True):
            if restarts:
                world.restart()
            await agent.fork().ask(user("Are you sure?"))
            (real,) = [turn for turn in await world.turns() if turn.parent_id is None and turn.state == "complete"]
            children = [turn for turn in await world.turns() if turn.parent_id is not None]
            assert {turn.parent_id for turn in children} == {real.id}
            assert {turn.continuation for turn in children} == {"exact"}
        assert len({turn.session_id for turn in await world.turns()}) == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [({"n": 2}, {}), ({"store": False}, {}), ({}, {"x_base_rl_purpose": "eval"})],
)
async def test_calls_that_teach_nothing_more_by_other_answers_get_none(
    shadowed: Shadowed, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with shadowed() as world:
        if headers:
            _, key = await world.session_key(purpose="eval")
            headers = {"authorization": f"Bearer {key}"}
        await world.post(body, **headers)
        await asyncio.sleep(0)
        assert "shadow" not in seen(world)
        assert len(world.engine.requests) == body.get("n", 1)


def test_the_share_of_calls_is_drawn_by_their_ids() -> None:
    ids = [new_turn_id() for _ in range(2000)]
    drawn = [each for each in ids if is_drawn(each, 0.1)]
    assert 130 < len(drawn) < 270
    assert all(is_drawn(each, 1.0) for each in ids)
    assert not any(is_drawn(each, 0.0) for each in ids)
    assert set(drawn) <= {each for each in ids if is_drawn(each, 0.2)}


async def test_a_call_takes_the_engine_from_shadow_answers_which_begin_again_when_it_is_idle(
    shadowed: Shadowed,
) -> None:
    async with shadowed(samples=2) as world:
        after_the_answer(world, world.engine.gate.clear)
        await world.post({})
        await world.engine.held.wait()
        first = {request.request_id for request in world.engine.requests[1:]}
        agent = asyncio.create_task(world.post({"messages": [user("And 1 + 1?")]}, x_base_rl_session="other"))
        await until(lambda: first <= set(world.engine.aborted))
        assert len(world.engine.requests) == 4, "the call did not wait for them"
        world.engine.gate.set()
        assert (await agent).status_code == 200
        await until(lambda: seen(world).count("shadow") == 4)
        assert not first & {turn.id for turn in await world.turns()}
        assert not world.seen.dropped


def after_the_answer(world: World, happen: Callable[[], None]) -> None:
    """Let something happen when the first shadow answer begins."""

    def script(_: GenerateRequest) -> list[int]:
        if len(world.engine.requests) == 2:
            happen()
        return world.answers[0]

    world.engine.script = script


@pytest.mark.parametrize("reason", ["late", "failed", "ended"])
async def test_what_does_not_become_complete_leaves_nothing(shadowed: Shadowed, reason: str) -> None:
    async with shadowed(samples=1, wait_seconds=0.3 if reason == "late" else 60.0) as world:

        def happen() -> None:
            if reason == "failed":
                world.engine.error = EngineUnavailable("it is down")
            else:
                world.engine.gate.clear()

        after_the_answer(world, happen)
        await world.post({})
        if reason == "ended":
            await world.engine.held.wait()
            await world.calls.aclose()
        await until(lambda: bool(world.seen.dropped))
        assert world.seen.dropped == [reason]
        assert [turn.state for turn in await world.turns()] == ["complete"]
        assert world.swaps.place_at(world.engine).load.calls == 0


async def test_shadow_answers_of_an_erased_session_are_not_recorded(shadowed: Shadowed) -> None:
    async with shadowed() as world:
        response = await world.post({})
        session = response.headers["x-base-rl-session"]
        store = world.store
        store.signals.erasures.listen(world.calls.forget)
        eraser = EraseService(store.database, store.runs, store.credentials, store.signals, store.clock)
        await eraser.erase(ErasureTarget(session=session))
        await until(lambda: len(world.seen.turns) + len(world.seen.dropped) == 4)
        assert {turn.messages == [] for turn in await world.turns()} == {True}


async def test_shadow_answers_are_redacted(shadowed: Shadowed) -> None:
    async with shadowed({"redaction": {"rules": ["email"]}}) as world:
        world.say("Write to ann@example.com.")
        await world.post({})
        await all_done(world, 4)
        for turn in await world.turns():
            assert "ann@example.com" not in str(turn.response)
            assert turn.masked


async def test_shadow_answers_use_the_limits_of_the_run_and_leave_half_of_them(shadowed: Shadowed) -> None:
    limits = {"calls_per_minute": 60, "burst_seconds": 6.0}
    async with shadowed({"limits": limits}) as world:
        await world.post({})
        await until(lambda: len(world.seen.turns) + len(world.seen.dropped) == 4)
        assert world.seen.dropped
        assert set(world.seen.dropped) == {"limited"}
        assert not world.store.limited.refused


JUDGES = {
    "ranks": {"kind": "relative", "model": "house/judge"},
    "alone": {"kind": "rubric", "model": "house/judge", "rubric": "1: right. 0: wrong."},
}


async def test_judges_that_compare_get_the_answer_with_its_shadow_answers(shadowed: Shadowed) -> None:
    """Once all of these are recorded or dropped; the others score sessions alone."""
    async with shadowed({"judges": JUDGES}, samples=2) as world:
        await world.post({})
        await all_done(world, 3)
        job = await comparison(world)
        while job.due_at > world.store.clock():
            job = await comparison(world)
        real, shadows = await real_and_shadows(world)
        (session,) = await world.sessions()
        first, *others = job.payload.pop("turns")
        assert (job.kind, job.payload) == ("judge", {"judge": "ranks", "session_id": session.id})
        assert first == real.id
        assert sorted(others) == sorted(turn.id for turn in shadows)


async def test_shadow_answers_whose_proxy_ends_before_the_last_one_are_compared_later(shadowed: Shadowed) -> None:
    async with shadowed({"judges": JUDGES}, samples=3, wait_seconds=600.0) as world:

        def script(_: GenerateRequest) -> list[int]:
            if len(world.engine.requests) == 3:  # the first shadow answer is on its way
                world.engine.gate.clear()
            return world.answers[0]

        world.engine.script = script
        await world.post({})
        await world.engine.held.wait()
        await until(lambda: "shadow" in seen(world))
        await world.calls.aclose()
        real, shadows = await real_and_shadows(world)
        job = await comparison(world)
        assert len(shadows) < 3
        assert job.payload["turns"] == [real.id, *(turn.id for turn in shadows)]
        assert 600 < job.due_at - world.store.clock() < 700


async def comparison(world: World) -> Any:
    """Return the only job."""
    columns = (JobRow.kind, JobRow.payload, JobRow.due_at)
    return await world.store.database.read(lambda connection: connection.execute(select(*columns)).one())


@pytest.mark.parametrize("ends_first", [True, False])
async def test_rewards_of_shadow_answers_are_compared_with_the_answers(shadowed: Shadowed, ends_first: bool) -> None:
    """Whether the session has ended before them or after them. Its own reward does not count for them."""
    async with shadowed(samples=2) as world:
        if ends_first:
            world.engine.gate.clear()
        answered = asyncio.create_task(world.post({}))
        if ends_first:
            await world.engine.held.wait()
            world.engine.gate.set()
        session = (await answered).headers["x-base-rl-session"]
        if ends_first:
            await world.http.post(f"/v1/sessions/{session}/end", json={})
        await all_done(world, 3)
        real, shadows = await real_and_shadows(world)
        turns = [real, *shadows]
        feedback = world.store.feedback
        for turn, value in zip(turns, (1.0, 0.0, 0.5), strict=True):
            await feedback.record(world.store.owner, [FeedbackItem(entries=(("reward", value),), turn_id=turn.id)])
        await feedback.record(
            world.store.owner, [FeedbackItem(entries=(("reward", 5.0),), session_id=session, final=True)]
        )
        claims = ClaimService(database=world.store.database, clock=world.store.clock, signals=world.store.signals)
        batch = await claims.claim(world.store.run, ClaimRequest(trainer="trainer", want=1))
        ((trajectory,),) = [group.trajectories for group in batch.groups]
        assert trajectory.reward == 5.0
        found = {turn.id: (turn.reward, turn.superseded, turn.trainable) for turn in trajectory.turns}
        assert found == {
            turns[0].id: (1.0, False, True),
            turns[1].id: (0.0, True, True),
            turns[2].id: (0.5, True, True),
        }
        assert {turn.state.value for turn in trajectory.turns} == {"complete"}
