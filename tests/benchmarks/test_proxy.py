"""Test the benchmark's own instruments: what they count, and that no failure counts as a fast answer."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.proxy import against, profile, report
from benchmarks.proxy.conversations import ANSWER, bodies, chats, generations
from benchmarks.proxy.load import Connection, Failed, closed, paced
from benchmarks.proxy.measures import quantile
from benchmarks.proxy.store import VERSIONS, fill
from benchmarks.proxy.stub import Stub
from benchmarks.proxy.systems import (
    BASE_RL,
    BASE_RL_BEFORE,
    BASE_RL_FSYNC,
    BASE_RL_MANY,
    LITELLM_NAME,
    RLLM_NAME,
)
from tests.docs.markdown import rows

PATH = "/v1/chat/completions"


@asynccontextmanager
async def serving(protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_the_load_is_as_large_as_asked() -> None:
    async with serving(Stub) as port:
        load = await closed(port, [chats(PATH, turns=2) for _ in range(3)], calls=20)
        assert len(load.calls) == 20
        assert all(0 < taken.whole < load.seconds and taken.first is None for taken in load.calls)


async def test_the_first_text_of_a_stream_is_timed() -> None:
    async with serving(Stub) as port:
        load = await closed(port, [chats(PATH, turns=1, stream=True)], calls=5, stream=True)
        assert all(taken.first is not None and 0 < taken.first < taken.whole for taken in load.calls)


async def test_a_paced_load_keeps_its_rate_and_counts_the_time_in_the_queue() -> None:
    async with serving(Stub) as port:
        load = await paced(port, lambda: chats(PATH, turns=1), rate=400, calls=100, seed=1)
        assert len(load.calls) == 100
        assert load.seconds > 100 / 400 / 2

    class Slow(Stub):
        """Answers one call after another, 5 ms each."""

        free_at = 0.0

        def answer(self, head: bytes, body: bytes) -> None:
            loop = asyncio.get_running_loop()
            Slow.free_at = max(Slow.free_at, loop.time()) + 0.005
            loop.call_at(Slow.free_at, super().answer, head, body)

    async with serving(Slow) as port:
        load = await paced(port, lambda: chats(PATH, turns=1), rate=2000, calls=60, seed=1)
        assert max(taken.whole for taken in load.calls) > 60 * 0.005 - 60 / 2000 - 0.1
        assert quantile([taken.whole for taken in load.calls], 0.5) > 0.02


class Refusing(asyncio.Protocol):
    """Answers with an error, or closes the connection without an answer."""

    answer = b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.answer)
        self._transport.close()


class Leaving(Refusing):
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nhalf"


class Silent(Refusing):
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("protocol", "says"), [(Refusing, "500 Oh"), (Leaving, "connection was lost"), (Silent, "no text")]
)
async def test_a_failure_does_not_count_as_an_answer(protocol: type[Refusing], says: str) -> None:
    async with serving(protocol) as port:
        connection = await Connection.open(port)
        with pytest.raises(Failed, match=says):
            await connection.call(next(chats(PATH, turns=1)), stream=True)
        connection.close()


def test_conversations_grow_and_no_two_begin_alike() -> None:
    first, *_, last = [msgspec.json.decode(body) for body in bodies(7, 50, stream=False)]
    assert len(first["messages"]) == 2
    assert len(last["messages"]) == 100
    assert last["messages"][2] == {"role": "assistant", "content": ANSWER}
    assert last["messages"][:2] == first["messages"]
    beginnings = [request.split(b"\r\n\r\n", 1)[1] for request in itertools.islice(chats(PATH, turns=1), 5)]
    assert len(set(beginnings)) == 5


def test_the_engine_gets_the_requests_that_the_proxy_would_send() -> None:
    short, longer = itertools.islice(generations(turns=2), 2)
    ids = [msgspec.json.decode(each.split(b"\r\n\r\n", 1)[1])["input_ids"] for each in (short, longer)]
    assert ids[1][: len(ids[0])] == ids[0]
    assert len(ids[1]) > len(ids[0]) + 20


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0, 1))
def test_a_quantile_is_not_exceeded_by_its_share(values: list[float], share: float) -> None:
    bound = quantile(values, share)
    assert bound in values
    assert sum(value <= bound for value in values) >= share * len(values)


def figures(**ours: float) -> dict[str, dict[str, Any]]:
    """Return figures that just reach all targets, except for the changed ones."""
    found = {
        "rate": 1000.0,
        "added": 2.0,
        "p50": 1.0,
        "p99": 10.0,
        "first": 3.0,
        "turn_100": 1.25,
        "many": 0.95,
    } | ours

    def system(rate: float, added: float, **more: float) -> dict[str, Any]:
        one = {"added_p50": added, "added_p99": 0.0}
        half = {"added_p50": more.get("p50", 1.0), "added_p99": more.get("p99", 1.0)}
        busy = {"calls_per_s": rate, "cpu_ms_per_call": 1.0}
        return {
            "one": one,
            "first_token": {"added_p50": more.get("first", 0.0)},
            "short": busy,
            "long": busy,
            "half_load": half,
        }

    base_rl = system(found["rate"], found["added"], p50=found["p50"], p99=found["p99"], first=found["first"])
    many_runs = system(1.0, 1.0)
    many_runs["short"] = {**many_runs["short"], "calls_per_s_vs_one": found["many"]}
    base_rl["turns"] = [1.0] * 99 + [found["turn_100"]]
    return {
        BASE_RL: base_rl,
        LITELLM_NAME: system(100.0, 16.0),
        RLLM_NAME: system(500.0, 2.0),
        BASE_RL_FSYNC: system(1.0, 1.0),
        BASE_RL_MANY: many_runs,
    }


def test_targets_that_are_just_reached_count_as_reached() -> None:
    result = report.headline(figures())
    assert [target.reached for target in report.judged(result)] == [True] * 8
    assert "MISSED" not in report.targets(result)
    assert "base-rl" in report.table(figures())


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"rate": 999.0}, {0, 1}),
        ({"added": 2.01}, {2, 3}),
        ({"p99": 10.1}, {4}),
        ({"turn_100": 1.26}, {5}),
        ({"first": 3.1}, {6}),
        ({"many": 0.94}, {7}),
    ],
)
def test_each_target_can_be_missed(changed: dict[str, float], missed: set[int]) -> None:
    judged = report.judged(report.headline(figures(**changed)))
    assert {index for index, target in enumerate(judged) if not target.reached} == missed


def test_the_result_has_the_documented_keys() -> None:
    result = report.rounded(report.headline(figures()))
    three = {"base_rl", "litellm", "rllm_gateway"}
    assert set(result["calls_per_s"]) == set(result["added_p50_ms"]) == set(result["added_p99_ms"]) == three
    assert all(isinstance(result[key], float) for key in ("turn_cost_100_vs_2", "added_ttft_ms", "cpu_ms_per_call"))
    assert result["turn_cost_100_vs_2"] == 1.25
    versions = {LITELLM_NAME: "1", RLLM_NAME: "2"}
    page = report.page({**result, "machine": {"processor": "P"}, "versions": versions, "rounds": 5, "runs": 200})
    assert "| base-rl |" in page
    assert rows(page)[-1] == report.target_rows(result)[-1]


def test_the_store_with_many_runs_has_what_its_name_says(tmp_path: Path) -> None:
    file = tmp_path / "many" / "base-rl.sqlite3"
    fill(file, 3, "base/model")
    with closing(sqlite3.connect(file)) as store:
        runs = store.execute("SELECT name, state, head_version, serving_version FROM runs ORDER BY name").fetchall()
        assert runs == [(f"other-{number}", "active", VERSIONS, VERSIONS) for number in range(3)]
        assert store.execute("SELECT count(*) FROM policy_versions").fetchone() == (3 * (VERSIONS + 1),)


def test_a_profile_lists_own_and_total_share(tmp_path: Path) -> None:
    stacks = tmp_path / "profile.txt"
    stacks.write_text("main (a.py:1);work (b.py:7) 3\nmain (a.py:2) 1\n")
    told = profile.table(stacks)
    assert told.splitlines()[0].startswith("4 samples")
    assert " 75.0%   75.0%  work (b.py" in told
    assert "100.0%   25.0%  main (a.py" in told


def test_a_proxy_is_compared_within_each_round() -> None:
    rounds: list[against.Round] = [
        {
            "short": {
                BASE_RL: {"cpu_ms_per_call": before * ratio, "calls_per_s": 1},
                BASE_RL_BEFORE: {"cpu_ms_per_call": before, "calls_per_s": 1},
            }
        }
        for before, ratio in ((1, 0.7), (10, 0.8), (2, 0.9))
    ]
    assert against.ratios(rounds) == {"short": 0.8}
    assert against.quartiles(rounds) == {"short": [0.7, 0.9]}
    assert against.medians(rounds) == {"short": {BASE_RL: 1.8, BASE_RL_BEFORE: 2}}
    assert [target.reached for target in against.judged(against.ratios(rounds))] == [True]


@pytest.mark.skipif(not (against.ROOT / ".git").exists(), reason="needs the repository's history")
def test_the_tree_of_a_revision_is_a_proxy(tmp_path: Path) -> None:
    against.extract("HEAD", tmp_path, [])
    assert (tmp_path / "proxy" / "__main__.py").is_file()
