"""Evaluate versions of a run on the tasks of a file, and keep the results at the proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.cli.attempts.journal import Finished, Journal
from proxy.cli.attempts.report import Report
from proxy.cli.attempts.runners import Runner
from proxy.cli.attempts.schedule import Plan, Schedule
from proxy.cli.attempts.sessions import SessionClient
from proxy.cli.attempts.task_file import Task
from proxy.cli.console import Refused
from proxy.cli.operations import Operations

# Results are posted this often. A kill loses those of the last interval, whose attempts are repeated.
_POST_SECONDS = 1.0
# Results in one request: the most that the proxy takes.
_MOST_RESULTS = 1000
# Pause between two looks for new candidates.
_WATCH_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated: `plan.group_size` attempts at each task of a suite. `call_place` is the address and key with
    which agents' sessions are opened."""

    run: str
    suite: str
    tasks: Sequence[Task]
    plan: Plan
    runner: Runner
    call_place: tuple[str, str]


class Evaluator:
    """Makes the attempts whose results the proxy does not have yet, and posts them."""

    def __init__(
        self,
        evaluation: Evaluation,
        operations: Operations,
        show: Callable[[Report], contextlib.AbstractAsyncContextManager[None]],
    ) -> None:
        self._evaluation = evaluation
        self._operations = operations
        self._show = show

    async def evaluate(self, version: int) -> Mapping[str, float]:
        """Return the mean reward by task of a version. Raise Refused."""
        wanted = self._evaluation
        journal = Journal(None)
        for result in await self._results(version):
            found = Finished(
                task=result["task"], number=result["attempt"], session_id="", seconds=0.0, reward=result["reward"]
            )
            journal.finished[found.key] = found
        total = wanted.plan.group_size * len(wanted.tasks)
        report = Report(total, [one for one in journal.finished.values() if self._is_wanted(one)])
        model = f"{wanted.run}@{version}"
        async with (
            SessionClient(*wanted.call_place, run=wanted.run, model=model) as client,
            self._posting(version) as post,
            self._show(report),
        ):
            await client.check()

            def listen(finished: Finished) -> None:
                report.add(finished)
                post(finished)

            schedule = Schedule(
                wanted.plan, wanted.tasks, client=client, runner=wanted.runner, journal=journal, listener=listen
            )
            await schedule.run()
        if report.failed:
            raise Refused(f"{report.failed} attempts of version {version} failed: {report.line()}; run this again")
        return _means(await self._results(version))

    async def watch(self, evaluated: Callable[[int, int, Mapping[str, float], Mapping[str, float]], None]) -> None:
        """Evaluate each new candidate, and the version that it would replace, until cancelled."""
        done: set[tuple[int, int]] = set()
        while True:
            pair = chosen(await self._operations.versions(self._evaluation.run), None)
            if pair[0] != pair[1] and pair not in done:
                old, new = await self.evaluate(pair[1]), await self.evaluate(pair[0])
                done.add(pair)
                evaluated(*pair, new, old)
            await asyncio.sleep(_WATCH_SECONDS)

    def _is_wanted(self, finished: Finished) -> bool:
        return finished.number < self._evaluation.plan.group_size and any(
            task.id == finished.task for task in self._evaluation.tasks
        )

    async def _results(self, version: int) -> list[dict[str, Any]]:
        path = f"versions/{version}/evaluations/{self._evaluation.suite}"
        found: list[dict[str, Any]] = (await self._operations.of_run(self._evaluation.run, path))["results"]
        return found

    @contextlib.asynccontextmanager
    async def _posting(self, version: int) -> AsyncIterator[Callable[[Finished], None]]:
        waiting: list[Finished] = []
        path = f"{version}/evaluations/{self._evaluation.suite}"

        async def flush() -> None:
            while waiting:
                part, waiting[:] = waiting[:_MOST_RESULTS], waiting[_MOST_RESULTS:]
                results = [
                    {
                        "task": one.task,
                        "attempt": one.number,
                        "reward": one.reward,
                        "session_id": one.session_id,
                    }
                    for one in part
                    if one.reward is not None
                ]
                if results:
                    await self._operations.change_versions(self._evaluation.run, path, {"results": results})

        async def repeat() -> None:
            while True:
                await asyncio.sleep(_POST_SECONDS)
                await flush()

        posting = asyncio.create_task(repeat())
        try:
            yield waiting.append
        finally:
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await flush()


def chosen(listed: Mapping[str, Any], version: int | None) -> tuple[int, int]:
    """Return the version to evaluate and the one to compare it with, from the answer of GET …/versions.

    By default the oldest candidate, whose gate waits first; without one, the version that should serve.
    """
    serving = next(listed[name] for name in ("pinned", "promoted", "serving") if listed[name] is not None)
    if version is not None:
        return version, serving
    candidates = [one["version"] for one in listed["versions"] if one["state"] == "candidate"]
    return min(candidates, default=serving), serving


def comparison(new: Mapping[str, float], old: Mapping[str, float]) -> dict[str, Any]:
    """Return the means of both versions over the tasks that both attempted, and how many became better and worse."""
    shared = sorted(new.keys() & old.keys())
    return {
        "tasks": len(shared),
        "mean": sum(new[task] for task in shared) / len(shared) if shared else None,
        "mean_before": sum(old[task] for task in shared) / len(shared) if shared else None,
        "better": sum(new[task] > old[task] for task in shared),
        "worse": sum(new[task] < old[task] for task in shared),
    }


def evaluation_plan(attempts: int, concurrency: int, seconds: float) -> Plan:
    """Return the plan of an evaluation: every task once, in the order of the file."""
    return replace(Plan(), group_size=attempts, concurrency=concurrency, seconds=seconds, purpose="eval")


def _means(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    by_task: dict[str, list[float]] = {}
    for result in results:
        by_task.setdefault(result["task"], []).append(result["reward"])
    return {task: sum(rewards) / len(rewards) for task, rewards in by_task.items()}
