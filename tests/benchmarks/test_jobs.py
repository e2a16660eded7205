"""Check the parts of the benchmark of jobs that could make its figures wrong: the judge's model, and the targets."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from benchmarks.jobs import calls
from benchmarks.jobs.judge_stub import JudgeStub
from proxy.judges.answers import read_object


async def test_the_model_of_the_judge_answers_every_request_late_with_a_score() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: JudgeStub(0.05, 0.0), "127.0.0.1", 0)
    async with server, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions"
        for _ in range(2):
            began = time.monotonic()
            reply = await client.post(url, json={"model": "judge", "messages": []})
            assert time.monotonic() - began >= 0.05
            grade = read_object(reply.json()["choices"][0]["message"]["content"], "score")
            assert 0 <= grade["score"] <= 1


@pytest.mark.parametrize(("ratio", "judgements", "reached"), [(1.05, 1000, [True, True]), (1.06, 999, [False] * 2)])
def test_the_targets(ratio: float, judgements: int, reached: list[bool]) -> None:
    found = calls.targets({"p50_ratio": ratio, "judgements": judgements})
    assert [target.reached for target in found] == reached


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    """A disturbance that hits both rounds of a pair does not count, and one that hits a single pair hardly does."""
    alone = [[0.02, 0.02, 0.03], [0.04, 0.04, 0.05], [0.02, 0.02, 0.02]]
    beside = [[0.02, 0.021, 0.03], [0.04, 0.042, 0.05], [0.2, 0.2, 0.2]]
    assert calls.ratio_of(beside, alone, 0.5) == 1.05
