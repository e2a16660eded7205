"""A candidate answers prompts of live calls: no caller sees it or waits for it, and its answers become pairs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from proxy.contract.policy import VersionState, weight_label
from proxy.database.tables import AnswerPairRow, PolicyVersionRow
from proxy.engines.protocol import GenerateRequest
from proxy.errors import BaseRlError, EngineFailed, EngineUnavailable
from proxy.gates.repository import GateRepository
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.tokens.template import ChatTemplate
from proxy.versions.service import VersionService
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.agents import user
from tests.proxy.calls.world import World, open_world, until
from tests.proxy.versions.publishing import fit_request, inspector, publish

CANDIDATE = 1
Shadowed = Callable[..., AbstractAsyncContextManager["Answering"]]


class Answering:
    """A world whose version 0 says "It is 42." to callers, and whose candidate, at `engine`, says "It is 41."."""

    def __init__(self, world: World, engine: FakeEngine) -> None:
        self.world = world
        self.engine = engine

    async def pairs(self) -> list[Any]:
        return await self.world.store.database.read(
            lambda connection: list(connection.execute(select(AnswerPairRow.__table__).order_by(AnswerPairRow.id)))
        )

    def has_outcomes(self, count: int) -> bool:
        return len(self.world.seen.outcomes) == count

    async def outcomes(self, *wanted: str) -> None:
        """Wait until candidates' answers had these outcomes."""
        await until(lambda: len(self.world.seen.outcomes) >= len(wanted))
        assert self.world.seen.outcomes == list(wanted)

    async def says(self, **headers: str) -> str:
        response = await self.world.post({}, **headers)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


@pytest.fixture
def shadowed(database_url: str, tmp_path: Path, template: ChatTemplate) -> Shadowed:
    """A world with a candidate, on both databases; the settings of its shadow, and further ones of the run."""

    @asynccontextmanager
    async def opened(run: dict[str, Any] | None = None, **shadow: Any) -> AsyncIterator[Answering]:
        release = {"policy": "gated", "shadow": {"share": 1.0, **shadow}}
        async with open_world(tmp_path, template, {"release": release, **(run or {})}, url=database_url) as world:
            world.say("It is 42.")
            store, ids = world.store, [*template.encode("It is 41."), template.stop_ids[0]]
            versions = VersionService(
                database=store.database, clock=store.clock, signals=store.signals, inspector=inspector()
            )
            await versions.commit(store.run, fit_request((), 0, publish(tmp_path / "weights")))
            await store.database.commit(
                lambda connection: GateRepository(connection).start_shadow(store.run.id, CANDIDATE, now=0.0)
            )
            label = weight_label(store.run.id, CANDIDATE)
            engine = FakeEngine(lambda _request: ids, label=label, address="fake://candidate")
            world.swaps.older[CANDIDATE], world.swaps.candidate = engine, CANDIDATE
            yield Answering(world, engine)

    return opened


async def test_a_candidate_answers_the_prompt_and_its_caller_sees_nothing_of_it(shadowed: Shadowed) -> None:
    async with shadowed() as here:
        response = await here.world.post({})
        assert response.json()["choices"][0]["message"]["content"] == "It is 42."
        assert response.json()["system_fingerprint"] == "policy@0"
        await here.outcomes("recorded")
        (turn,), (pair,) = await here.world.turns(), await here.pairs()
        assert (turn.state, turn.spans) == ("complete", [[0, 0, turn.spans[0][2]]])
        assert (pair.turn_id, pair.session_id, pair.version, pair.against) == (turn.id, turn.session_id, 1, 0)
        assert (pair.state, pair.finish_reason, pair.preference) == ("complete", "stop", None)
        assert pair.response["choices"][0]["text"] == "It is 41."
        assert pair.output_tokens == len(here.engine.script(here.engine.requests[0]))
        assert here.engine.requests[0].input_ids == here.world.engine.requests[0].input_ids
        (session,) = await here.world.sessions()
        assert session.turn_count == 1


async def test_a_streamed_call_is_not_longer_for_it(shadowed: Shadowed) -> None:
    """The answer has its end while the candidate still generates."""
    async with shadowed() as here:
        here.engine.gate.clear()
        response = await here.world.post({"stream": True})
        assert response.text.rstrip().endswith("data: [DONE]")
        assert "It is 41." not in response.text
        await here.engine.held.wait()
        assert await here.pairs() == []
        here.engine.gate.set()
        await here.outcomes("recorded")


@pytest.mark.parametrize(
    ("body", "case"),
    [({"n": 2}, ""), ({"store": False}, ""), ({}, "eval"), ({"model": "policy@0"}, ""), ({}, "canary")],
)
async def test_calls_that_are_no_live_traffic_of_the_serving_version_are_left_alone(
    shadowed: Shadowed, body: dict[str, Any], case: str
) -> None:
    async with shadowed() as here:
        headers = {}
        if case == "eval":
            _, key = await here.world.session_key(purpose="eval")
            headers = {"authorization": f"Bearer {key}"}
        if case == "canary":
            here.world.engine.label = weight_label(here.world.store.run.id, 2)
        assert (await here.world.post(body, **headers)).status_code == 200
        await here.world.calls.aclose()
        assert (here.engine.requests, here.world.seen.outcomes) == ([], [])


async def test_the_share_of_the_calls_is_the_setting(shadowed: Shadowed) -> None:
    async with shadowed(share=0.3, answers=1000) as here:
        for _ in range(60):
            await here.says()
        await until(lambda: len(here.world.seen.outcomes) == len(here.engine.requests))
        assert 4 < len(here.engine.requests) < 34


async def test_no_answer_is_generated_beyond_those_that_the_gates_need(shadowed: Shadowed) -> None:
    async with shadowed(answers=3) as here:
        for number in range(6):
            await here.says()
            needed = min(number + 1, 3)
            await until(partial(here.has_outcomes, needed))
        assert (len(await here.pairs()), len(here.engine.requests)) == (3, 3)
        # After a restart, one more shows that there are enough.
        here.world.restart()
        await here.says()
        await until(partial(here.has_outcomes, 4))
        await here.says()
        await here.world.calls.aclose()
        assert (len(await here.pairs()), len(here.engine.requests)) == (3, 4)


@pytest.mark.parametrize(
    ("error", "outcome", "pairs"),
    [
        (EngineFailed("it broke"), "failed", 1),
        (EngineUnavailable("it is down"), "unserved", 0),
    ],
)
async def test_a_failure_never_reaches_the_caller_and_counts_if_it_is_the_candidates(
    shadowed: Shadowed, error: BaseRlError, outcome: str, pairs: int
) -> None:
    async with shadowed() as here:
        here.engine.error = error
        assert await here.says() == "It is 42."
        await here.outcomes(outcome)
        found = await here.pairs()
        assert len(found) == pairs
        if pairs:
            assert (found[0].state, found[0].output_tokens) == ("failed", 0)
        assert here.world.swaps.place_at(here.engine).load.calls == 0


async def test_a_candidate_that_does_not_end_has_failed(shadowed: Shadowed) -> None:
    async with shadowed(wait_seconds=0.2) as here:
        here.engine.gate.clear()
        assert await here.says() == "It is 42."
        await here.outcomes("failed")
        (pair,) = await here.pairs()
        assert pair.state == "failed"
        assert pair.response["choices"][0]["failure"].startswith("no end after 0.2 seconds")


async def test_a_call_takes_the_engine_from_the_candidate_which_begins_again(shadowed: Shadowed) -> None:
    """As with adapters, which one engine holds beside the serving version."""
    async with shadowed() as here:
        world = here.world
        label = weight_label(world.store.run.id, CANDIDATE)
        world.swaps.older[CANDIDATE] = world.engine
        serving = world.engine.label

        def script(_request: GenerateRequest) -> list[int]:
            # The second request is the candidate's first attempt; the third is the next call.
            is_candidates = len(world.engine.requests) in (2, 4, 5)
            world.engine.label = label if is_candidates else serving
            if len(world.engine.requests) == 2:
                world.engine.gate.clear()
            return world.answers[0]

        world.engine.script = script
        await here.says()
        await world.engine.held.wait()
        first = world.engine.requests[1].request_id
        call = asyncio.create_task(here.says(x_base_rl_session="other"))
        await until(lambda: first in world.engine.aborted)
        world.engine.gate.set()
        assert await call == "It is 42."
        await until(lambda: len(world.seen.outcomes) == 2)
        assert world.seen.outcomes == ["recorded", "recorded"]
        assert first not in {pair.turn_id for pair in await here.pairs()}


async def test_under_load_prompts_wait_for_a_free_engine_and_are_dropped(shadowed: Shadowed) -> None:
    async with shadowed(wait_seconds=0.2) as here:
        world = here.world
        world.swaps.older[CANDIDATE] = world.engine
        world.engine.gate.clear()
        busy = asyncio.create_task(world.post({"messages": [user("Think for long.")]}, x_base_rl_session="busy"))
        await world.engine.held.wait()
        place = world.swaps.place_at(world.engine)
        assert place.load.calls == 1
        # The other call is answered at another engine, and its prompt finds the candidate's engine busy.
        world.swaps.engines[world.store.run.id] = FakeEngine(
            lambda _request: world.answers[0], label=world.engine.label, address="fake://second"
        )
        assert await here.says() == "It is 42."
        await here.outcomes("late")
        assert await here.pairs() == []
        world.engine.gate.set()
        assert (await busy).status_code == 200


async def test_waiting_prompts_are_bounded(shadowed: Shadowed) -> None:
    async with shadowed() as here:
        here.engine.gate.clear()
        for _ in range(33):
            await here.says()
        assert here.world.seen.outcomes == ["full"]
        await here.world.calls.aclose()
        assert here.world.seen.outcomes == ["full"] + ["ended"] * 32


@pytest.mark.parametrize("state", [VersionState.REJECTED, VersionState.COMMITTED, VersionState.CANARY])
async def test_the_answer_of_a_version_that_is_decided_meanwhile_is_not_recorded(
    shadowed: Shadowed, state: VersionState
) -> None:
    async with shadowed() as here:
        here.engine.gate.clear()
        await here.says()
        await here.engine.held.wait()

        def decide(connection: Connection) -> None:
            of_candidate = PolicyVersionRow.version == CANDIDATE
            connection.execute(update(PolicyVersionRow).where(of_candidate).values(state=state.value))

        await here.world.store.database.commit(decide)
        here.engine.gate.set()
        await here.outcomes("unwanted")
        assert await here.pairs() == []


async def test_answers_are_redacted_and_those_of_an_erased_session_are_not_recorded(shadowed: Shadowed) -> None:
    async with shadowed({"redaction": {"rules": ["email"]}}) as here:
        world = here.world
        ids = [*world.template.encode("Write to ann@example.com."), world.template.stop_ids[0]]
        here.engine.script = lambda _request: ids
        await here.says()
        await here.outcomes("recorded")
        (pair,) = await here.pairs()
        assert "ann@example.com" not in str(pair.response)
        here.engine.gate.clear()
        response = await world.post({})
        store = world.store
        store.signals.erasures.listen(world.calls.forget)
        eraser = EraseService(store.database, store.runs, store.credentials, store.signals, store.clock)
        await eraser.erase(ErasureTarget(session=response.headers["x-base-rl-session"]))
        await until(lambda: len(world.seen.outcomes) == 2)
        assert world.seen.outcomes == ["recorded", "ended"]
        assert len(await here.pairs()) == 1


async def test_an_answer_of_another_version_than_the_candidate_is_dropped(shadowed: Shadowed) -> None:
    async with shadowed() as here:
        here.engine.label = weight_label(here.world.store.run.id, 5)
        await here.says()
        await here.outcomes("swapped")
        assert await here.pairs() == []


async def test_a_candidates_answer_uses_no_limits_of_the_caller(shadowed: Shadowed) -> None:
    limits = {"calls_per_minute": 60, "burst_seconds": 3.0}
    async with shadowed({"limits": limits}) as here:
        for _ in range(3):
            await here.says()
        await here.outcomes("recorded", "recorded", "recorded")
        assert not here.world.store.limited.refused
