"""kill -9 of the proxy between the recording of shadow answers and their comparison: each is compared, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.installation import Installation, installation
from tests.proxy.judges.model_server import serving_model
from tests.proxy.judges.test_comparisons import by_length

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

CALLS = 6
# Answers that wait for their comparison: the job of each call has the turns.
WAITING = "SELECT id FROM jobs WHERE kind = 'judge' AND state = 'waiting'"
UNFINISHED = "SELECT id FROM jobs WHERE kind = 'judge' AND state IN ('waiting', 'failed', 'running')"
SHADOWS = "SELECT id FROM turns WHERE state = 'shadow'"
REWARDS = "SELECT turn_id, COUNT(*) FROM rewards WHERE source = 'judge:ranks' GROUP BY turn_id"


async def test_answers_that_a_kill_leaves_uncompared_are_compared_once(tmp_path: Path) -> None:
    async with serving_model() as judge:
        judge.answers = [by_length]
        run = {
            "shadow": {"share": 1.0, "samples": 4, "wait_seconds": 5.0},
            "judges": {"ranks": {"kind": "relative", "model": "house/judge"}},
        }
        providers = {"house": {"base_url": judge.url, "api_key": "sk-judge"}}
        async with installation(tmp_path, with_trainer=False, providers=providers, **run) as found:
            async with found.client() as client:
                await asyncio.gather(*(ask(client, number) for number in range(CALLS)))
            await found.until(lambda: bool(found.ask_store(WAITING)), what="an answer that waits for others")
            restarts = found.stack.supervisor.restarts("proxy")
            found.kill("proxy")
            await found.until(lambda: found.stack.supervisor.restarts("proxy") > restarts, what="the proxy again")
            assert found.ask_store(SHADOWS)
            await found.until(lambda: not found.ask_store(UNFINISHED), what="all comparisons")
            assert_compared_once(found)


async def ask(client: httpx.AsyncClient, number: int) -> None:
    body = {"model": "calculator", "messages": [{"role": "user", "content": f"What is {number} + 3?"}]}
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()


def assert_compared_once(found: Installation) -> None:
    payloads = found.ask_store("SELECT payload FROM jobs WHERE kind = 'judge' AND state = 'done'")
    turns = [turn for (payload,) in payloads for turn in json.loads(payload)["turns"]]
    assert len(turns) == len(set(turns))
    assert {turn for (turn,) in found.ask_store(SHADOWS)} <= set(turns)
    assert dict(found.ask_store(REWARDS)) == dict.fromkeys(turns, 1)
