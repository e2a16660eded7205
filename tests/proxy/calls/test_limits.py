"""Limits as agents experience them: 429s that their SDKs wait out, and calls that do not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import AsyncAnthropic

from proxy.errors import EngineFailed
from proxy.tokens.template import ChatTemplate
from tests.database import PostgresServer, needs_postgresql
from tests.proxy.calls.world import USER, World, listening, open_world

ASKED: dict[str, Any] = {"model": "policy", "messages": [USER]}
NAMED = {"x_base_rl_session": "job"}

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {}),
    ("/v1/completions", {"prompt": "What is 17 + 25?"}),
    ("/v1/messages", {"max_tokens": 16}),
    ("/v1/responses", {"input": "What is 17 + 25?"}),
]

Limited = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def limited(database_url: str, tmp_path: Path, template: ChatTemplate) -> Limited:
    """A world whose run has these limits, on both databases."""

    @asynccontextmanager
    async def opened(**limits: Any) -> AsyncIterator[World]:
        async with open_world(tmp_path, template, {"limits": limits}, url=database_url) as world:
            yield world

    return opened


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], list[float]]:
    """Let SDKs' waits pass at once on the world's clock, and return their lengths."""

    def install(world: World) -> list[float]:
        slept: list[float] = []
        sleep = asyncio.sleep

        async def nap(seconds: float) -> None:
            slept.append(seconds)
            world.store.clock.now += seconds
            await sleep(0)

        monkeypatch.setattr("anyio.sleep", nap)
        return slept

    return install


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_limited_call_gets_the_error_of_its_dialect(
    limited: Limited, path: str, body: dict[str, Any]
) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world:
        assert (await world.post(body, path)).status_code == 200
        for stream in (False, True):
            refused = await world.post({**body, "stream": stream}, path)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
            error = refused.json()["error"]
            assert error["type"] == ("rate_limit_error" if "messages" in path else "requests")
            assert error["code"] == "rate_limit_exceeded"
            assert "run.limits.calls_per_minute" in error["message"]
        assert len(await world.turns()) == len(await world.sessions()) == 1, "what is refused opens no session"
        world.store.clock.now += 10
        assert (await world.post(body, path)).status_code == 200


async def test_openais_sdk_waits_as_requested_and_is_served(
    limited: Limited, naps: Callable[[World], list[float]]
) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world, world.sdk(max_retries=2) as client:
        slept = naps(world)
        for _ in range(3):
            answer = await client.chat.completions.create(**ASKED)
            assert answer.choices[0].message.content == "The answer is 42."
        assert slept == [10.0, 10.0]
        assert len(await world.turns()) == len(await world.sessions()) == 3
        with pytest.raises(openai.RateLimitError) as told:
            await client.with_options(max_retries=0).chat.completions.create(**ASKED)
        assert (told.value.type, told.value.code) == ("requests", "rate_limit_exceeded")


async def test_anthropics_sdk_waits_as_requested_and_is_served(
    limited: Limited, naps: Callable[[World], list[float]]
) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world, listening(world.app) as address:
        slept = naps(world)
        async with AsyncAnthropic(api_key=world.key, base_url=address) as client:
            for _ in range(2):
                await client.messages.create(model="policy", max_tokens=16, messages=[USER])
        assert slept == [10.0]


async def test_answers_report_the_remaining_limit(limited: Limited) -> None:
    async with limited(calls_per_minute=60, tokens_per_minute=60_000) as world:
        for stream, left in ((False, "9"), (True, "8")):
            answered = await world.post({"stream": stream}, **NAMED)
            assert answered.headers["x-ratelimit-limit-requests"] == "60"
            assert answered.headers["x-ratelimit-remaining-requests"] == left
            assert answered.headers["x-ratelimit-reset-requests"] == f"{10 - int(left)}.000s"
            assert answered.headers["x-ratelimit-limit-tokens"] == "60000"
        tokens = int(answered.headers["x-ratelimit-remaining-tokens"])
        assert 0 < 10_000 - tokens - 1000 < 1000, "the first call's are known"
        assert answered.headers["x-ratelimit-reset-tokens"].endswith("s")


async def test_without_limits_answers_say_nothing_of_them(world: World) -> None:
    answered = await world.post({})
    assert not [name for name in answered.headers if name.startswith("x-ratelimit")]


async def test_tokens_are_counted_at_a_calls_end(limited: Limited) -> None:
    async with limited(tokens_per_minute=60, burst_seconds=1) as world:
        usage = (await world.post({}, **NAMED)).json()["usage"]
        refused = await world.post({}, **NAMED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        assert int(refused.headers["retry-after"]) == usage["total_tokens"] - 1
        world.store.clock.now += usage["total_tokens"] - 1
        assert (await world.post({}, **NAMED)).status_code == 200


async def test_a_call_that_fails_before_its_first_token_costs_no_tokens(limited: Limited) -> None:
    async with limited(tokens_per_minute=60, burst_seconds=1) as world:
        world.engine.error = EngineFailed("broken")
        assert [(await world.post({})).status_code for _ in range(3)] == [502] * 3


async def test_answers_that_are_given_again_and_counts_of_tokens_are_free(limited: Limited) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1, max_waiting=0) as world:
        first = await world.post({}, **NAMED, idempotency_key="one")
        for _ in range(2):
            again = await world.post({}, **NAMED, idempotency_key="one")
            assert (again.status_code, again.json()) == (200, first.json())
        assert (await world.post({}, "/v1/messages/count_tokens")).status_code == 200
        world.restart()  # the answer is found in the store
        assert (await world.post({}, **NAMED, idempotency_key="one")).json()["id"] == first.json()["id"]
        assert (await world.post({}, **NAMED)).status_code == 429


async def test_an_sdks_retry_of_an_answered_call_is_free(limited: Limited) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world:
        first = await world.post({}, x_stainless_retry_count="0")
        again = await world.post({}, x_stainless_retry_count="1")
        assert again.json() == first.json()


@pytest.mark.parametrize("headers", [{}, NAMED])
async def test_a_refused_call_sent_again_does_not_get_the_answer_of_an_equal_one(
    limited: Limited, headers: dict[str, str]
) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world:
        world.say("first", "second")
        first = await world.post({}, **headers, x_stainless_retry_count="0")
        assert (await world.post({}, **headers, x_stainless_retry_count="0")).status_code == 429
        assert (await world.post({}, **headers, x_stainless_retry_count="1")).status_code == 429
        world.store.clock.now += 10
        second = await world.post({}, **headers, x_stainless_retry_count="2")
        assert text_of(first) == "first"
        assert text_of(second) == "second"
        sessions = {answer.headers["x-base-rl-session"] for answer in (first, second)}
        assert len(sessions) == (1 if headers else 2)


def text_of(answer: httpx.Response) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


async def test_a_retry_that_is_refused_stays_in_its_session(limited: Limited) -> None:
    """Its first request opened the session and got no answer; the second was refused."""
    async with limited(calls_per_minute=6, burst_seconds=1) as world:
        world.engine.error = EngineFailed("broken")
        assert (await world.post({}, x_stainless_retry_count="0")).status_code == 502
        world.engine.error = None
        assert (await world.post({}, x_stainless_retry_count="1")).status_code == 429
        world.store.clock.now += 10
        assert (await world.post({}, x_stainless_retry_count="2")).status_code == 200
        assert len(await world.sessions()) == 1


async def test_errors_of_a_call_are_reported_first(limited: Limited) -> None:
    async with limited(calls_per_minute=6, burst_seconds=1) as world:
        assert (await world.post({})).status_code == 200
        assert (await world.post({"model": "another"})).status_code == 404
        assert (await world.post({"messages": "none"})).status_code == 400
        assert (await world.post({}, authorization="Bearer rl-run-unknown")).status_code == 401
        assert (await world.post({})).status_code == 429


async def let_wait(world: World, count: int) -> None:
    """Create this many ended sessions that are ready for a trainer."""
    for _ in range(count):
        session_id, _key = await world.session_key(purpose="eval")
        ready = {"state": "ended", "training": "ready", "purpose": "train"}
        await world.store.set_session(session_id, **ready)
    world.store.clock.now += 1.0


async def test_while_the_trainer_is_behind_only_open_sessions_continue(limited: Limited) -> None:
    async with limited(max_waiting=2) as world:
        session_id, key = await world.session_key()
        assert (await world.post({}, **NAMED)).status_code == 200
        unnamed = await world.post({"messages": [USER]})
        await let_wait(world, 2)
        assert (await world.post({})).status_code == 200, "two may wait"
        await let_wait(world, 1)

        for refused in (
            await world.post({}),
            await world.post({}, x_base_rl_session="another"),
            await world.post({}, "/sessions/third/v1/chat/completions"),
            await world.http.post("/v1/sessions", json={"n": 4}),
        ):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert refused.json()["error"]["code"] == "trainer_behind"
            assert "run.limits.max_waiting" in refused.json()["error"]["message"]
        goes_on = [USER, unnamed.json()["choices"][0]["message"], USER]
        for served in (
            await world.post({}, authorization=f"Bearer {key}"),
            await world.post({}, f"/sessions/{session_id}/v1/chat/completions"),
            await world.post({}, **NAMED),
            await world.post({"messages": goes_on}),
            await world.http.post("/v1/sessions", json={"purpose": "eval"}),
        ):
            assert served.status_code in (200, 201), served.text
        assert set(world.store.limited.refused) == {"max_waiting"}


async def test_an_open_session_is_known_as_such_after_a_restart(
    limited: Limited, database_url: str, tmp_path: Path, template: ChatTemplate
) -> None:
    async with limited(max_waiting=0) as world:
        assert (await world.post({}, **NAMED)).status_code == 200
        await let_wait(world, 1)
    async with limited(max_waiting=0) as world:
        assert (await world.post({}, **NAMED)).status_code == 200
        assert (await world.post({}, x_base_rl_session="another")).status_code == 429


@needs_postgresql
async def test_with_serve_calls_have_no_limits_while_the_store_is_away(
    tmp_path: Path, template: ChatTemplate
) -> None:
    server = PostgresServer()
    try:
        server.start()
        url, limits = server.url(server.take()), {"calls_per_minute": 60, "tokens_per_minute": 6000}
        async with open_world(tmp_path, template, {"limits": limits}, url=url, when_unavailable="serve") as world:
            assert (await world.post({}, **NAMED)).status_code == 200
            server.stop()
            for _ in range(20):
                served = await world.post({}, **NAMED)
                assert (served.status_code, served.headers["x-base-rl-unrecorded"]) == (200, "store_unavailable")
            server.start()
            world.store.clock.now += 5.0
            assert "x-base-rl-unrecorded" not in (await world.post({}, **NAMED)).headers
    finally:
        server.remove()
