"""Which attempts run when: groups of sessions, task by task, as many attempts at once as the plan allows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from proxy.cli.attempts.journal import Finished, Journal
from proxy.cli.attempts.runners import AttemptFailed, Runner
from proxy.cli.attempts.sessions import RequestRefused, Session, SessionClient
from proxy.cli.attempts.task_file import Task
from proxy.cli.console import Refused

# If every attempt fails from the start, the agent or its address is wrong: more attempts would only hide the reason.
_HOPELESS = 20
_CANCEL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`group_size` attempts at each task, whose rewards are compared, `passes` times over all tasks (None: without
    end). `seconds` bounds one attempt. `seed` shuffles the tasks of every pass; None: the order of the file."""

    group_size: int = 1
    concurrency: int = 16
    passes: int | None = 1
    seconds: float = 300.0
    purpose: str = "train"
    seed: int | None = None


class Schedule:
    """Runs the attempts of a plan that the journal does not have yet."""

    def __init__(
        self,
        plan: Plan,
        tasks: Sequence[Task],
        *,
        client: SessionClient,
        runner: Runner,
        journal: Journal,
        listener: Callable[[Finished], None],
    ) -> None:
        """`listener` is called after every attempt."""
        self._plan = plan
        self._tasks = tasks
        self._client = client
        self._runner = runner
        self._journal = journal
        self._listener = listener
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._open: dict[str, Session] = {}
        self._failures_from_the_start = 0
        self._succeeded = False

    async def run(self) -> None:
        """Return once every attempt has ended. Cancelled: cancel the sessions under way, within seconds.

        Raise Refused if the proxy refuses to open sessions, or if no attempt at all succeeds.
        """
        try:
            async with asyncio.TaskGroup() as running:
                for round_, task in self._rounds():
                    await self._begin(round_, task, running)
        except* Refused as refusals:
            raise refusals.exceptions[0] from None
        finally:
            await self._cancel_open()

    def _rounds(self) -> Iterator[tuple[int, Task]]:
        rng = None if self._plan.seed is None else random.Random(self._plan.seed)  # noqa: S311
        for round_ in itertools.count() if self._plan.passes is None else range(self._plan.passes):
            tasks = list(self._tasks)
            if rng is not None:
                rng.shuffle(tasks)
            yield from ((round_, task) for task in tasks)

    async def _begin(self, round_: int, task: Task, running: asyncio.TaskGroup) -> None:
        """Open the sessions of a group, and start each attempt as soon as there is room for it."""
        size = self._plan.group_size
        numbers = [n for n in range(round_ * size, (round_ + 1) * size) if not self._journal.has(task.id, n)]
        if not numbers:
            return
        async with self._slots:  # open a group only when there is room for its first attempt
            sessions = await self._client.open(
                task=task.id,
                group=f"{self._journal.series}-{round_}-{task.id}",
                group_size=size,
                count=len(numbers),
                purpose=self._plan.purpose,
            )
        self._open |= {session.id: session for session in sessions}
        for number, session in zip(numbers, sessions, strict=True):
            await self._slots.acquire()
            attempt = running.create_task(self._attempt(task, number, session))
            attempt.add_done_callback(lambda _: self._slots.release())

    async def _attempt(self, task: Task, number: int, session: Session) -> None:
        started = time.monotonic()
        reward, problem = None, None
        try:
            reward = await self._attempt_once(task, session)
        except AttemptFailed as failure:
            problem = str(failure)
            await self._client.end(session, "failed")
        self._open.pop(session.id, None)
        finished = Finished(
            task=task.id,
            number=number,
            session_id=session.id,
            seconds=round(time.monotonic() - started, 3),
            reward=reward,
            problem=problem,
        )
        self._journal.add(finished)
        self._listener(finished)
        self._give_up_if_hopeless(problem)

    async def _attempt_once(self, task: Task, session: Session) -> float | None:
        """Run the attempt, post its feedback, end its session, and return its reward. Raise AttemptFailed."""
        try:
            async with asyncio.timeout(self._plan.seconds):
                feedback = await self._runner.run(task, session)
        except TimeoutError:
            raise AttemptFailed(f"no result after {self._plan.seconds:g} seconds") from None
        try:
            if feedback.items:
                # Rewards of turns first: the session's own reward ends it.
                items = sorted(feedback.items, key=lambda item: "turn_id" not in item)
                await self._client.post(session, items)
            if feedback.reward is None:
                await self._client.end(session, "completed")
        except RequestRefused as error:
            raise AttemptFailed(f"its feedback is refused: {error}") from error
        return feedback.reward

    def _give_up_if_hopeless(self, problem: str | None) -> None:
        self._succeeded |= problem is None
        if self._succeeded:
            return
        self._failures_from_the_start += 1
        if self._failures_from_the_start >= _HOPELESS:
            raise Refused(f"the first {_HOPELESS} attempts all failed; the last: {problem}")

    async def _cancel_open(self) -> None:
        sessions = list(self._open.values())
        self._open.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                ended = (self._client.end(session, "cancelled") for session in sessions)
                await asyncio.gather(*ended, return_exceptions=True)
