"""The agents of one run: they attempt problems, and post the rewards of the run's own rule."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections import deque
from collections.abc import Iterator
from itertools import islice

from openai import AsyncOpenAI, OpenAIError

from agents_examples.calculator.agent import solve
from agents_examples.calculator.sessions import Session, open_group
from agents_examples.calculator.tasks import Problem, problems
from benchmarks.runs.rules import rewards

MEMBERS = 8
"""Sessions per problem."""
WINDOW = 128
"""Number of sessions in a reported mean reward."""
_CALL_SECONDS = 120.0


class RunAgents:
    """The agents of the run `name`, whose rule has the same name. `concurrency` bounds the sessions at work."""

    def __init__(self, url: str, key: str, name: str, *, seed: int, concurrency: int) -> None:
        self.name = name
        self.sessions = self.failed = 0
        self.first_at: float | None = None
        self.last_at = 0.0
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=5, timeout=_CALL_SECONDS)
        self._problems = problems(seed)
        self._unique = uuid.uuid4().hex[:8]
        self._slots = asyncio.Semaphore(concurrency)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._groups = 0

    @property
    def reward(self) -> float:
        """The mean reward of the last sessions."""
        return statistics.fmean(self._recent) if self._recent else 0.0

    async def train(self, sessions: int) -> None:
        """Complete this many sessions for training, and record when the first one began and the last one ended."""
        self.first_at = time.monotonic()
        await self._attempt_all(islice(self._problems, sessions // MEMBERS), "train", MEMBERS)
        self.last_at = time.monotonic()

    async def evaluate(self, sessions: int) -> dict[str, float]:
        """Return the mean reward of new sessions under every rule. They are not trained."""
        found = await self._attempt_all(islice(self._problems, sessions), "eval", 1)
        return {name: round(statistics.fmean(each[name] for each in found), 4) for name in found[0]}

    async def aclose(self) -> None:
        await self._client.close()

    async def _attempt_all(self, tasks: Iterator[Problem], purpose: str, size: int) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []

        async def attempt(session: Session, problem: Problem) -> None:
            try:
                found.append(await self._attempt(session, problem))
            except OpenAIError:
                self.failed += 1
            finally:
                self._slots.release()

        async with asyncio.TaskGroup() as running:
            for problem in tasks:
                await self._slots.acquire()
                for number, session in enumerate(await self._group(problem, purpose, size)):
                    if number:
                        await self._slots.acquire()
                    running.create_task(attempt(session, problem))
        return found

    async def _group(self, problem: Problem, purpose: str, size: int) -> list[Session]:
        self._groups += 1
        group = f"runs-{self._unique}-{self._groups}"
        return await open_group(self._client, task=problem.expression, group=group, size=size, purpose=purpose)

    async def _attempt(self, session: Session, problem: Problem) -> dict[str, float]:
        found = rewards(problem, await solve(session.client, self.name, problem.question))
        await session.post_reward(found[self.name])
        self.sessions += 1
        self._recent.append(found[self.name])
        return found
