"""The answer's header names every part of a request that was changed or ignored: in every dialect, streamed or
not."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.calls.call import RequestedSampling
from proxy.calls.sampling import changes, resolve_sampling
from proxy.contract.trajectory import Purpose
from proxy.dialects.endpoints import warning_header
from proxy.settings import RunSettings, SamplingMode, SamplingSettings
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import USER, World
from tests.running_app import bearer

GREEDY = "temperature is 1 instead of 0: run.sampling.mode is raise_greedy"
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("max_tokens", {"messages": [USER]}),
    "/v1/completions": ("max_tokens", {"prompt": "say"}),
    "/v1/responses": ("max_output_tokens", {"input": "say"}),
    "/v1/messages": ("max_tokens", {"messages": [USER], "max_tokens": 5}),
}


async def warned(world: World, path: str, key: str | None = None, **more: Any) -> str:
    body = {"model": "policy", **DIALECTS[path][1], **more}
    response = await world.http.post(path, json=body, headers={} if key is None else bearer(key))
    assert response.status_code == 200, response.text
    return str(response.headers.get("x-base-rl-warning", ""))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
async def test_every_dialect_reports_its_changes(world: World, path: str, stream: bool) -> None:
    world.say("word")
    bound, _ = DIALECTS[path]
    assert await warned(world, path, stream=stream) == ""
    said = await warned(world, path, stream=stream, temperature=0)
    assert said == GREEDY
    more: Any = {bound: 32_000, "repetition_penalty": 1.1, "suffix_of": None}
    said = await warned(world, path, stream=stream, **more)
    assert "repetition_penalty has no effect: there is no such field" in said
    assert "new tokens instead of 32000" in said
    assert "suffix_of" not in said


@pytest.mark.parametrize("path", DIALECTS)
async def test_in_evaluation_nothing_is_changed(world: World, path: str) -> None:
    world.say("word")
    _, key = await world.session_key(purpose="eval")
    assert await warned(world, path, key, temperature=0) == ""


async def test_fields_that_name_sessions_and_users_cause_no_warning(world: World) -> None:
    world.say("word")
    named: Any = {"user": "ada", "safety_identifier": "ada", "prompt_cache_key": "k", "metadata": {"session_id": "s"}}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert await warned(world, path, **named) == ""


async def test_a_response_with_store_false_is_recorded_anyway(world: World) -> None:
    world.say("word")
    said = await warned(world, "/v1/responses", store=False, max_tool_calls=3)
    stored = "with store false the call is recorded all the same, but cannot be read again"
    assert said == f"max_tool_calls has no effect; {stored}"
    assert await warned(world, "/v1/responses", store=True) == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
async def test_the_answer_to_a_repeated_request_has_the_same_warnings(world: World, path: str, stream: bool) -> None:
    """From memory, and from the store in another process."""
    world.say("word")
    bound, fields = DIALECTS[path]
    body = {"model": "policy", **fields, bound: 32_000, "temperature": 0, "stream": stream, "x_vendor": 1}
    headers = {"Idempotency-Key": "once", "X-Base-RL-Session": "job"}
    first = await world.http.post(path, json=body, headers=headers)
    said = first.headers["x-base-rl-warning"]
    assert GREEDY in said
    assert "new tokens instead of 32000" in said
    assert "x_vendor" in said
    from_memory = await world.http.post(path, json=body, headers=headers)
    world.restart()
    from_store = await world.http.post(path, json=body, headers=headers)
    for again in (from_memory, from_store):
        assert again.status_code == 200
        assert again.headers.get("x-base-rl-warning") == said
    (turn,) = await world.turns()
    assert from_store.headers["x-base-rl-turn"] == turn.id


async def test_a_repeated_request_of_several_choices_names_each_change_once(world: World) -> None:
    world.say("one", "two")
    body = {"model": "policy", "messages": [USER], "n": 2, "temperature": 0}
    headers = {"Idempotency-Key": "once", "X-Base-RL-Session": "job"}
    for _ in range(2):
        answered = await world.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answered.headers["x-base-rl-warning"] == GREEDY
        world.restart()
    assert len(await world.turns()) == 2


async def test_a_repeated_request_of_an_ended_session_has_the_warning_again(world: World) -> None:
    world.say("word")
    session, key = await world.session_key()
    await world.http.post(f"/v1/sessions/{session}/end", json={}, headers=bearer(key))
    for _ in range(2):
        answered = await world.post({}, **bearer(key), idempotency_key="once")
        assert "not trained" in answered.headers["x-base-rl-warning"]
        world.restart()
    assert len(await world.turns()) == 1


async def test_counting_reports_what_it_left_out(world: World) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "policy", "messages": [USER], "tools": [tool]}
    counted = await world.http.post("/v1/messages/count_tokens", json=body)
    assert counted.headers["x-base-rl-warning"] == "tools[0] of type web_search_20250305 is ignored"


ASKED = RequestedSampling(
    temperature=0.2, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0, max_new_tokens=20
)


@pytest.mark.parametrize("mode", SamplingMode)
@pytest.mark.parametrize("asked", [RequestedSampling(), RequestedSampling(temperature=0.0), ASKED])
def test_a_warning_appears_exactly_if_the_engine_gets_another_value(
    template: ChatTemplate, mode: SamplingMode, asked: RequestedSampling
) -> None:
    run = RunSettings(sampling=SamplingSettings(mode=mode, temperature=0.8), max_new_tokens=10)
    given = resolve_sampling(asked, run=run, purpose=Purpose.TRAIN, template=template, prompt_tokens=10)
    said = {told.partition(" ")[0] for told in changes(asked, given, run)}
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    differing = {
        name for name in names if getattr(asked, name) is not None and getattr(asked, name) != getattr(given, name)
    }
    assert said == differing | ({"at"} if asked.max_new_tokens is not None else set())
    assert bool(differing) == (asked.temperature is not None and not (mode is SamplingMode.RESPECT or (
        mode is SamplingMode.RAISE_GREEDY and asked is ASKED
    )))  # fmt: skip


def test_the_bound_names_its_reason(template: ChatTemplate) -> None:
    asked, run = RequestedSampling(max_new_tokens=32_000), RunSettings()
    near_the_end = resolve_sampling(asked, run=run, purpose=Purpose.TRAIN, template=template, prompt_tokens=500)
    assert changes(asked, near_the_end, run) == ["at most 12 new tokens instead of 32000: the context's length"]


def test_a_long_warning_ends_with_an_ellipsis() -> None:
    assert warning_header(["w" * 2000])["x-base-rl-warning"] == "w" * 1000 + "..."
    assert warning_header([]) == {}


async def test_a_retry_count_of_thousands_of_digits_is_ignored(world: World) -> None:
    world.say("word")
    assert (await world.post({}, **{"x-stainless-retry-count": "9" * 5000})).status_code == 200
