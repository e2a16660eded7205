"""The waits that `probe` measured, with and without a hostile client."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.chaos.faults import HOSTILITY, Faults
from benchmarks.chaos.probe import EVERY_S

_ROUND_S = 5.0
_START_S = 60.0
"""Seconds that the probe's process may take to start on a busy machine."""


def waits(file: Path, since: float, until: float) -> list[float]:
    """Return the waits, in seconds, of requests between two times; requests without an answer are omitted.

    A long wait counts once for every request that would have been due meanwhile, each with the rest of it: a stall of
    five seconds is not a single slow answer among hundreds.
    """
    found = []
    for line in file.read_text().splitlines():
        at, _, waited = line.partition(" ")
        if waited not in ("", "-") and since <= float(at) < until:
            left = float(waited)
            while left > 0:
                found.append(left)
                left -= EVERY_S
    return found


async def _started(file: Path) -> None:
    """Wait until the probe has written its first line."""
    while not file.exists() or not waits(file, 0, time.time()):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def measure(faults: Faults, file: Path, rounds: int) -> dict[str, float]:
    """Measure with and without a hostile client, alternately. Return the 99th percentiles of a client's wait, in
    milliseconds. Raises TimeoutError if the probe does not start."""
    await asyncio.wait_for(_started(file), _START_S)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for is_hostile in (False, True):
            began = time.time()
            async with AsyncExitStack() as stack:
                if is_hostile:
                    await stack.enter_async_context(faults.fault(HOSTILITY))
                await asyncio.sleep(_ROUND_S)
            found[is_hostile] += waits(file, began, time.time())
            await asyncio.sleep(1.0)  # an attack that had begun ends
    quiet, hostile = (1000 * statistics.quantiles(found[is_hostile], n=100)[-1] for is_hostile in (False, True))
    return {
        "p99_ms": round(quiet, 1),
        "p99_ms_beside_a_hostile_client": round(hostile, 1),
        "p99_ms_added": round(hostile - quiet, 1),
    }
