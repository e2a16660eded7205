"""An engine that joins the pool of a base-rl elsewhere: started here, added there, drained and removed at the end.

Slurm, Ray and Kubernetes each run this program once for every engine. The engine's row in the store is the only
state: a host that was killed leaves its row, and the next host of that name replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from proxy.cli.console import Refused
from proxy.cli.operations import Operations, ProxyUnreachable
from proxy.cli.supervisor import Part, PartFailed, Supervisor
from proxy.contract.visible import visible
from proxy.engines.launch import LaunchPlan

_ENGINE_STOP_S = 5.0
_READY_POLL_S = 0.2
_DRAIN_POLL_S = 0.5
_LONGEST_PAUSE_S = 15.0
_ANSWER_S = 5.0


class HostedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The engine to host. `run` is the one run that it serves; None for any run of `base_model`."""

    name: str
    plan: LaunchPlan
    kind: str
    base_model: str
    run: str | None = None


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the waits of a host, in seconds."""

    join: float = 600.0
    """From the ready engine until the proxy has added it."""
    heartbeat: float = 5.0
    """Pause between two looks at the engine and at its row."""
    hung: float = 60.0
    """An engine that answers nothing for this long is killed, and started again."""
    drain: float = 60.0
    """For calls under way when the host is asked to end."""


class NameTaken(Refused):
    """Another engine has the name at the proxy. The message says what to do."""


class EngineHost:
    """Hosts one engine. `say` gets a line for everything that an operator may want to know."""

    def __init__(
        self,
        engine: HostedEngine,
        proxy: Operations,
        *,
        log_dir: Path,
        bounds: Bounds,
        say: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._proxy = proxy
        self._log_dir = log_dir
        self._bounds = bounds
        self._say = say

    async def run(self) -> None:
        """Host the engine until somebody removes it at the proxy. Cancelling drains and removes it.

        Raises PartFailed if the engine does not start or dies again and again, ProxyUnreachable if it could not join
        in time, NameTaken if another engine took its name.
        """
        engine = self._engine
        part = Part(name=engine.name, argv=engine.plan.argv, env=engine.plan.env, stop_seconds=_ENGINE_STOP_S)
        async with (
            Supervisor([part], self._log_dir, lambda name, what: self._say(f"{name}: {what}")) as supervisor,
            # Without the environment's proxies, which do not know this machine's address.
            httpx.AsyncClient(base_url=engine.plan.url, timeout=_ANSWER_S, trust_env=False) as client,
        ):
            await _until_ready(client, supervisor)
            await self._join()
            try:
                await self._watch(client, supervisor)
            except (asyncio.CancelledError, PartFailed):
                await self._leave()
                raise

    async def _join(self) -> None:
        """Add the engine at the proxy, in the place of an earlier one of its name."""
        deadline = time.monotonic() + self._bounds.join
        pause, said = 0.5, ""
        while True:
            try:
                await self._remove_earlier()
                await self._proxy.add_engine(self._row())
            except ProxyUnreachable as error:
                if time.monotonic() + pause > deadline:
                    raise
                if said != (said := str(error)):
                    self._say(f"{self._engine.name} could not be added; it is tried again: {error}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._say(f"{self._engine.name} is in the pool at {self._engine.plan.url}")
                return

    async def _remove_earlier(self) -> None:
        for row in await self._proxy.engines():
            if row["name"] != self._engine.name:
                continue
            if row["origin"] != "api":
                raise NameTaken(f"{self._engine.name} is an engine of the proxy's configuration: choose another name")
            await self._proxy.remove_engine(self._engine.name, force=True)

    def _row(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "name": engine.name,
            "url": engine.plan.url,
            "kind": engine.kind,
            "base_model": engine.base_model,
            "run": engine.run,
        }

    async def _watch(self, client: httpx.AsyncClient, supervisor: Supervisor) -> None:
        """Return when the engine's row is gone. An engine that hangs is killed, so that the supervisor starts it
        again; while the proxy is away, the engine goes on for the other proxies."""
        answered = time.monotonic()
        proxy_answers = True
        while True:
            await asyncio.sleep(self._bounds.heartbeat)
            supervisor.raise_for_failure()
            # An engine that is starting again answers nothing either, so it gets the time of a start.
            if await _answers(client):
                answered = time.monotonic()
            elif time.monotonic() - answered > self._bounds.hung and supervisor.alive(self._engine.name):
                self._say(f"{self._engine.name} answered nothing for {self._bounds.hung:.0f} s and is killed")
                supervisor.kill()
                await _until_ready(client, supervisor)
                answered = time.monotonic()
            try:
                if not await self._is_in_the_pool():
                    self._say(f"{self._engine.name} was removed from the pool")
                    return
                proxy_answers = True
            except ProxyUnreachable as error:
                if proxy_answers:
                    self._say(f"the engine goes on: {error}")
                proxy_answers = False

    async def _is_in_the_pool(self) -> bool:
        """Return whether the engine has its row. Raise NameTaken if another address has its name."""
        for row in await self._proxy.engines():
            if row["name"] == self._engine.name:
                if row["url"].rstrip("/") != self._engine.plan.url:
                    raise NameTaken(
                        f"an engine at {row['url']} took the name {self._engine.name}: this one ends; name every"
                        " engine differently"
                    )
                return True
        return False

    async def _leave(self) -> None:
        """Drain the engine and remove it. A proxy that does not answer keeps the row: it finds the engine dead, and
        the next host of the name replaces the row."""
        try:
            async with asyncio.timeout(self._bounds.drain):
                state = (await self._proxy.switch_engine(self._engine.name, "drain", force=True))["state"]
                while state != "drained":
                    await asyncio.sleep(_DRAIN_POLL_S)
                    rows = await self._proxy.engines()
                    state = next((row["state"] for row in rows if row["name"] == self._engine.name), "drained")
        except TimeoutError:
            self._say(f"{self._engine.name} still has calls after {self._bounds.drain:.0f} s; they end with an error")
        except ProxyUnreachable as error:
            self._say(f"{self._engine.name} is not drained: {error}")
            return
        with contextlib.suppress(ProxyUnreachable):
            await self._proxy.remove_engine(self._engine.name, force=True)
            self._say(f"{self._engine.name} left the pool")


async def _until_ready(client: httpx.AsyncClient, supervisor: Supervisor) -> None:
    """Wait until the engine would generate. A large model may take long to load, so the bound is the supervisor's: it
    gives up an engine that dies again and again."""
    while not await _answers(client, "/health_generate"):
        supervisor.raise_for_failure()
        await asyncio.sleep(_READY_POLL_S)


async def _answers(client: httpx.AsyncClient, path: str = "/health") -> bool:
    try:
        return (await client.get(path)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def say(line: str) -> None:
    """Write a line for an operator to standard error, which schedulers keep as the job's log."""
    sys.stderr.write(f"{visible(line)}\n")
    sys.stderr.flush()
