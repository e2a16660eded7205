"""The measurements of one system. Every function makes one; rounds and medians are in `__main__`."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from benchmarks.proxy.conversations import ANSWER, LONG_TURNS, SHORT_TURNS
from benchmarks.proxy.load import Connection, Failed, Load, Requests, closed, paced
from benchmarks.proxy.systems import System

CLIENTS = 32
"""Connections at saturation, for short conversations."""
BLOCKS = 6
"""Number of alternations between calls through a proxy and calls without it."""

AWAKE_SECONDS = 20.0
"""Seconds to wait for a proxy that was stopped, which reaches its engine again at once; many times what that
takes."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Seconds of each measurement, connections with long conversations, and conversations for the cost of a turn."""

    seconds: float
    long_clients: int
    conversations: int


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def check(system: System) -> None:
    """Check the system's answer, so that an error is not taken for a quick answer."""
    connection = await Connection.open(system.port)
    await connection.call(next(system.requests(1, False)), stream=False)
    body = msgspec.json.decode(connection.body)
    if "choices" in body and body["choices"][0]["message"]["content"] != ANSWER:
        raise RuntimeError(f"{system.name} answered {body}")
    connection.close()


async def answers_again(system: System) -> None:
    """Wait until a system that was stopped and continued answers: at first its proxy may count the engine as lost.

    Raises TimeoutError.
    """
    async with asyncio.timeout(AWAKE_SECONDS):
        while True:
            try:
                await check(system)
            except Failed:
                await asyncio.sleep(0.1)
            else:
                return


async def one_at_a_time(system: System, effort: Effort, *, stream: bool) -> dict[str, float]:
    """Return milliseconds of calls one after another, and the system's own share: with it minus without it."""
    seconds: dict[str, list[float]] = {"through": [], "without": []}
    assert system.behind is not None
    both = {"through": system, "without": system.behind}
    clients = {key: each.requests(SHORT_TURNS, stream) for key, each in both.items()}
    calls = dict.fromkeys(both, 20)
    for block in range(BLOCKS + 1):
        for key, each in both.items():
            load = await closed(each.port, [clients[key]], calls=calls[key], stream=stream)
            if block > 0:  # the first warms up, and says how many calls fit into the time
                seconds[key] += [taken.whole if taken.first is None else taken.first for taken in load.calls]
            else:
                calls[key] = max(20, int(len(load.calls) / load.seconds * effort.seconds / BLOCKS / 2))
    result: dict[str, float] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        through, without = (quantile(seconds[key], share) * 1000 for key in ("through", "without"))
        result |= {name: through, f"added_{name}": through - without, f"without_{name}": without}
    return result


async def saturated(system: System, effort: Effort, *, turns: int = SHORT_TURNS) -> dict[str, float]:
    """Return calls per second with as many clients as keep the system busy, and CPU milliseconds of the measured
    process per call."""
    clients = [system.requests(turns, False) for _ in range(CLIENTS if turns == SHORT_TURNS else effort.long_clients)]
    warm = await closed(system.port, clients, calls=len(clients) * 4)
    least = len(clients) * (turns if turns == LONG_TURNS else 4)
    calls = max(least, int(len(warm.calls) / warm.seconds * effort.seconds))
    if turns == LONG_TURNS:
        calls = math.ceil(calls / least) * least  # whole conversations, so that every turn counts alike
        clients = [system.requests(turns, False) for _ in clients]
    before = system.cpu_seconds()
    load = await closed(system.port, clients, calls=calls)
    cpu = system.cpu_seconds() - before
    return {
        "calls_per_s": len(load.calls) / load.seconds,
        "cpu_ms_per_call": cpu * 1000 / len(load.calls),
        "p50": quantile([taken.whole for taken in load.calls], 0.5) * 1000,
        "p99": quantile([taken.whole for taken in load.calls], 0.99) * 1000,
    }


async def half_loaded(system: System, effort: Effort, *, rate: float, seed: int) -> dict[str, float]:
    """Return milliseconds of calls at random times at half of the system's saturation, with and without the
    system."""
    assert system.behind is not None
    calls = max(50, int(rate * effort.seconds))
    loads: dict[str, Load] = {}
    for key, each in (("without", system.behind), ("through", system)):
        client = partial(each.requests, SHORT_TURNS, False)
        loads[key] = await paced(each.port, client, rate=rate, calls=calls, seed=seed)
    result = {"rate": rate}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        through, without = (
            quantile([taken.whole for taken in loads[key].calls], share) * 1000 for key in ("through", "without")
        )
        result |= {name: through, f"added_{name}": through - without, f"without_{name}": without}
    return result


async def turn_costs(system: System, effort: Effort, *, turns: int = 100) -> list[float]:
    """Return CPU milliseconds of a call at every turn of a conversation, as medians over the conversations.

    Calls are made one at a time, because concurrent calls share commits and look cheaper. The conversations are at
    different turns, and each starts again at its end, so that every turn is measured all the time: otherwise a
    machine that becomes faster would look like a cheaper turn.
    """
    connection = await Connection.open(system.port)
    seconds: list[list[float]] = [[] for _ in range(turns)]
    talks: list[tuple[int, Requests]] = []
    for number in range(effort.conversations):
        begun, talk = number * turns // effort.conversations, system.requests(turns, False)
        for _ in range(begun):
            await connection.call(next(talk), stream=False)
        talks.append((begun, talk))
    for step in range(turns):
        for begun, talk in talks:
            request = next(talk)
            before = system.cpu_seconds()
            await connection.call(request, stream=False)
            seconds[(begun + step) % turns].append(system.cpu_seconds() - before)
    connection.close()
    return [statistics.median(each) * 1000 for each in seconds]
