"""The proxy's background tasks, which run from the end of its start until its stop begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from proxy.errors import StoreUnavailable
from proxy.http.descriptors import CHECK_SECONDS, DescriptorWatch
from proxy.log import logger
from proxy.overview.figures import REFRESH_SECONDS
from proxy.services import Services

# Sessions and claims expire in tens of seconds at the least: a sweep that is two seconds late is not noticed.
_SWEEP_SECONDS = 2.0

# Longest time until this process drops from memory what another proxy erased from the store.
_ERASURES_SECONDS = 1.0

# How late a version is promoted, rejected or rolled back after the last session that decides it.
_GATES_SECONDS = 1.0

# Pause before deleted runs that could not be removed, or whose process died, are removed.
_DELETIONS_SECONDS = 15.0

_LOG = logger(__name__)


async def start_background(services: Services, stack: AsyncExitStack) -> None:
    """Start every background task; `stack` stops them in reverse, and ends the model calls in flight among them."""
    await stack.enter_async_context(_running("clock", services.clock.run()))
    await stack.enter_async_context(_repeated("overview", REFRESH_SECONDS, services.overview.refresh_figures))
    services.engines.start()
    stack.push_async_callback(services.engines.stop)
    placing_seconds = services.settings.engine.health_interval_seconds
    await stack.enter_async_context(_repeated("placing", placing_seconds, services.engines.refresh))
    # Calls that still generate are recorded on the way out, so this comes before the engine's tasks stop.
    stack.push_async_callback(services.calls.aclose)
    await stack.enter_async_context(_repeated("erasures", _ERASURES_SECONDS, services.erasing.poll_marks))

    async def sweep() -> None:
        await services.credentials.write_uses()
        await services.sessions.sweep()
        await services.claims.expire()
        await services.erasing.scrub_if_due()
        await services.background_jobs.sweeper.sweep()

    await stack.enter_async_context(_repeated("sweep", _SWEEP_SECONDS, sweep))
    await stack.enter_async_context(_repeated("gates", _GATES_SECONDS, services.gate_keeper.tend))
    # A loop of its own: a large run takes minutes, and sweeps must not wait for it.
    await stack.enter_async_context(_repeated("deletions", _DELETIONS_SECONDS, services.run_deletion.finish_all))
    await stack.enter_async_context(_running("webhooks", services.webhook_follower.run()))
    # Last, so that it stops first: its jobs use the store and whatever their handlers need.
    jobs = services.background_jobs
    await stack.enter_async_context(_running("jobs", jobs.worker.run()))
    if jobs.dispatcher is not None:
        await stack.enter_async_context(_running("dispatcher", jobs.dispatcher.run()))
    await stack.enter_async_context(_repeated("descriptors", CHECK_SECONDS, DescriptorWatch().check))


@asynccontextmanager
async def _repeated(name: str, seconds: float, action: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `action`, with pauses of `seconds`, until the block ends. Failures are logged, and the next round runs."""

    async def repeat() -> None:
        while True:
            try:
                await action()
            except StoreUnavailable as error:
                _LOG.warning("background task waits for the store", task=name, error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("background task failed", task=name)
            await asyncio.sleep(seconds)

    async with _running(name, repeat()):
        yield


@asynccontextmanager
async def _running(name: str, work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` until the block ends, then cancel it. An error that ended it earlier is logged then."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("background task ended with an error", task=name, error=repr(task.exception()))
