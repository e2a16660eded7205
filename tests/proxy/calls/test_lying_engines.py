"""Engines with inconsistent answers, behind the real adapter and a real store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engines.faults import EngineFaults
from proxy.engines.sglang import SglangEngine
from proxy.overview.health import HealthCheck
from proxy.settings import EngineSettings
from proxy.tokens.template import ChatTemplate
from tests.database import sqlite_database
from tests.fakes.lying_engine import Event, Honest, Lie, LyingEngine, lying_engine
from tests.proxy.calls.world import World, open_world, output_ids
from tests.proxy.store import open_store


@pytest.fixture
async def liar(template: ChatTemplate) -> AsyncIterator[LyingEngine]:
    async with lying_engine([*template.encode("The answer is 42."), template.stop_ids[0]]) as engine:
        yield engine


@pytest.fixture
async def world(tmp_path: Path, template: ChatTemplate, liar: LyingEngine) -> AsyncIterator[World]:
    engine = SglangEngine(liar.url, EngineSettings(url=liar.url, read_timeout_seconds=0.3))
    async with open_world(tmp_path, template, serving=engine) as opened:
        yield opened
        await engine.aclose()


def _last(**changed: Any) -> Lie:
    return lambda truth: truth.whole(**changed)


def _logprobs(*values: Any) -> Lie:
    return lambda truth: truth.whole(output_token_logprobs=truth.scored(*values))


def _ids(change: Callable[[int], Any]) -> Lie:
    """Return the last chunk with its second id changed, and its log-probability likewise."""

    def lie(truth: Honest) -> list[Event]:
        ids = truth.ids[2:]
        ids[1] = change(ids[1])
        return truth.whole(output_ids=ids, output_token_logprobs=[[-0.5, token, None] for token in ids])

    return lie


def _too_many(truth: Honest) -> list[Event]:
    truth.ids = truth.ids * 1000
    return truth.whole()


LIES: dict[str, Lie] = {
    "logprob_of_minus_1e308": _logprobs(-1e308),
    "lowest_float32": _logprobs(-3.4028234663852886e38),
    "positive_logprob": _logprobs(0.5),
    "enormous_logprob": _logprobs(1e308),
    "nan_logprob": _logprobs(float("nan")),
    "minus_infinity": _logprobs(float("-inf")),
    "no_logprob": _logprobs(None),
    "text_logprob": _logprobs("-0.5"),
    "id_beyond_the_vocabulary": _ids(lambda _: 100_000),
    "negative_id": _ids(lambda _: -1),
    "id_of_2_to_the_40": _ids(lambda _: 1 << 40),
    "id_of_2_to_the_80": _ids(lambda _: 1 << 80),
    "text_id": _ids(lambda _: "7"),
    "more_tokens_than_asked": _too_many,
    "fewer_logprobs_than_tokens": lambda truth: truth.whole(output_token_logprobs=truth.scored()[:-1]),
    "no_logprobs_at_all": _last(output_token_logprobs=None),
    "logprobs_of_other_tokens": _last(output_token_logprobs=[[-0.5, 1, None]] * 99),
    "fewer_tokens_than_before": lambda truth: [truth.chunk(0, 2), truth.chunk(0, 1, finish="stop")],
    "goes_on_after_its_end": lambda truth: [truth.chunk(0, 2, finish="stop"), *truth.whole()[1:]],
    "negative_count": _last(completion_tokens=-3),
    "another_prompt": _last(prompt_tokens=1),
    "versions_of_another_run": _last(weight_version="run_other@3"),
    "version_beyond_all": _last(weight_version="run@" + "9" * 40),
    "versions_that_overlap": _last(
        weight_versions=[{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}]
    ),
    "version_that_is_no_number": _last(weight_version="run@²"),
    "unknown_finish": _last(finish_reason={"type": "sorcery"}),
    "finish_of_another_type": _last(finish_reason="stop"),
    "no_meta": lambda truth: [truth.chunk(0, 2), {"output_ids": [1]}],
    "error_in_the_stream": lambda truth: [truth.chunk(0, 2), {"error": {"message": "boom", "code": 500}}],
    "garbage": lambda truth: [truth.chunk(0, 2), b"data: \x1f\x8b\x08\x00\xff\n\n"],
    "deep_nesting": lambda truth: [truth.chunk(0, 2), b"data: " + b'{"error":' * 50_000 + b"\n\n"],
    "end_without_finish": lambda truth: [truth.chunk(0, 2)],
    "silence": lambda truth: [truth.chunk(0, 2), 5.0],
}


async def _failed(world: World) -> Any:
    (turn,) = await world.turns()
    assert (turn.state, output_ids(turn), turn.output_logprobs) == ("failed", [], b"")
    return turn


@pytest.mark.parametrize("name", LIES)
async def test_a_lie_in_mid_stream_ends_with_an_error_and_a_failed_turn(
    world: World, liar: LyingEngine, name: str
) -> None:
    liar.lie = LIES[name]
    response = await world.post({"stream": True, "max_tokens": 50})
    assert response.status_code in (200, 502), "200 where the stream had begun before the lie"
    last = response.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["message"]
    assert "[DONE]" not in response.text
    assert '"finish_reason":"stop"' not in response.text
    turn = await _failed(world)
    (choice,) = turn.response["choices"]
    assert liar.url in choice["failure"]


@pytest.mark.parametrize("name", sorted(LIES.keys() - {"silence", "error_in_the_stream", "fewer_tokens_than_before"}))
async def test_a_lie_in_a_whole_answer_is_an_upstream_error(world: World, liar: LyingEngine, name: str) -> None:
    liar.lie = LIES[name]
    response = await world.post({"max_tokens": 50})
    if name in ("end_without_finish", "goes_on_after_its_end"):
        return  # only a stream can have this fault
    assert response.status_code in (502, 503)
    assert response.json()["error"]["type"] in ("upstream_error", "unavailable_error")
    if response.json()["error"]["code"] == "invalid_engine_reply":
        await _failed(world)


async def test_rounding_above_zero_is_accepted(world: World, liar: LyingEngine) -> None:
    liar.lie = _logprobs(1e-7, -103.0)
    response = await world.post({"max_tokens": 50, "logprobs": True})
    assert response.status_code == 200
    (turn,) = await world.turns()
    assert turn.state == "complete"
    told = [token["logprob"] for token in response.json()["choices"][0]["logprobs"]["content"]]
    assert told[2:4] == [0.0, -103.0]


async def test_an_endless_line_is_cut_off(world: World, liar: LyingEngine) -> None:
    liar.lie = lambda truth: [truth.chunk(0, 2), b"data: " + b"x" * (3 << 20)]
    response = await world.post({"stream": True, "max_tokens": 50})
    assert "invalid_engine_reply" in response.text
    await _failed(world)


async def test_an_engine_with_invalid_replies_is_a_problem_of_health(tmp_path: Path, template: ChatTemplate) -> None:
    store_clock = [1000.0]
    faults = EngineFaults(lambda: store_clock[0])
    for reason in ("token id -1", "NaN"):
        faults.note("http://engine:30000", reason)
    async with open_store(sqlite_database(tmp_path)) as store:
        health = HealthCheck(database=store.database, clock=store.clock, engines=None, data_dir=None, faults=faults)
        (problem,) = (await health.check()).problems
        assert "http://engine:30000" in problem
        assert "2 invalid replies" in problem
        assert "NaN" in problem
        store_clock[0] += 601
        assert (await health.check()).problems == ()
