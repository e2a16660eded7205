"""Tests of time bounds that pass on machines of every speed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from proxy.errors import EngineTimeout


async def at_some_pace(check: Callable[[float], Awaitable[None]], *units: float) -> None:
    """Run a check whose waits and bounds are multiples of its argument, in seconds, until it holds.

    A machine that stalls for longer than a short bound proves nothing, so a longer unit is tried then. A fault of the
    code fails with every unit.
    """
    for unit in units[:-1]:
        try:
            return await check(unit)
        except (AssertionError, EngineTimeout):
            continue
    return await check(units[-1])
