"""The groups of a run: engines in a number that changes, and the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from proxy.cli.cluster.ray.plan import Group
from proxy.cli.cluster.ray.scaling import LoadRule, WantedEngines
from proxy.cli.operations import ProxyUnreachable

# Pause between two looks at the wanted number and at the load.
_LOOK_S = 1.0

Row = dict[str, Any]


class Fleet:
    """Keeps groups running by `keep`, which runs one until it ends by itself or is cancelled. `rows` returns the
    engines of the pool, as the API has them; `say` gets a line for everything that an operator may want to know."""

    def __init__(
        self,
        *,
        engine: Callable[[int], Group],
        trainer: Group | None,
        keep: Callable[[Group], Coroutine[Any, Any, None]],
        rule: LoadRule,
        wanted: WantedEngines,
        rows: Callable[[], Awaitable[list[Row]]],
        say: Callable[[str], None],
    ) -> None:
        """`engine` returns the group of the engine with a number, from 1 on."""
        self._engine = engine
        self._trainer = trainer
        self._keep = keep
        self._rule = rule
        self._wanted = wanted
        self._rows = rows
        self._say = say
        self._others: list[asyncio.Task[None]] = []
        # By the numbers of engines. One that is ending still has its name.
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ending: dict[int, asyncio.Task[None]] = {}

    async def run(self, engines: int) -> None:
        """Keep the trainer and, at first, this number of engines running until all have ended by themselves.
        Cancelling ends them in order. Raises what `keep` raises, after the others have ended."""
        self._wanted.begin()
        try:
            if self._trainer is not None:
                self._others.append(self._started(self._trainer))
            self._resize(engines)
            while tasks := self._tasks():
                await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._forget_ended()
                self._wanted.touch()
                if (number := self._wanted.take()) is not None:
                    self._say(f"engines: {len(self._running)} run, and {number} are asked for")
                    self._resize(number)
                await self._follow_load()
        finally:
            self._wanted.end()
            # A task that is ending must not be cancelled again, which would interrupt its end.
            for task in (*self._others, *self._running.values()):
                task.cancel()
            await asyncio.gather(*self._tasks(), return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._others, *self._running.values(), *self._ending.values()]

    def _started(self, group: Group) -> asyncio.Task[None]:
        return asyncio.create_task(self._keep(group), name=group.name)

    def _forget_ended(self) -> None:
        """Forget the groups that have ended, and raise the error of one that failed."""
        for task in self._tasks():
            if task.done() and not task.cancelled():
                task.result()
        self._others = [task for task in self._others if not task.done()]
        self._running = {number: task for number, task in self._running.items() if not task.done()}
        self._ending = {number: task for number, task in self._ending.items() if not task.done()}

    def _resize(self, engines: int) -> None:
        """Start or end engines until so many run: the lowest free numbers start, the highest end."""
        number = 1
        while len(self._running) < engines:
            if number not in self._running and number not in self._ending:
                self._running[number] = self._started(self._engine(number))
            number += 1
        while len(self._running) > engines:
            self._remove(max(self._running))

    def _remove(self, number: int) -> None:
        """Let an engine drain and leave the pool."""
        task = self._ending[number] = self._running.pop(number)
        task.cancel()

    async def _follow_load(self) -> None:
        if not self._rule.acts:
            return
        names = {self._engine(number).name: number for number in sorted(self._running)}
        try:
            rows = {row["name"]: row for row in await self._rows()}
        except ProxyUnreachable:
            return  # nothing is known of the load
        ours = {name: rows[name] for name in names if name in rows}
        change = self._rule.decide(ours, len(names), time.monotonic())
        if change is None:
            return
        if change.remove is None:
            self._say(f"an engine is added: {change.reason}")
            self._resize(len(names) + 1)
        else:
            self._say(f"{change.remove} drains and is removed: {change.reason}")
            self._remove(names[change.remove])
