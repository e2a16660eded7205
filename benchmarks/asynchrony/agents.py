"""Agents whose tools take time: the calculator's agents, with a sleep in each call of the tool."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agents_examples.calculator.sessions import Session, open_group
from agents_examples.calculator.tasks import CALCULATOR, Problem, calculate, problems, score

MODEL = "calculator"
GROUPS, MEMBERS = 8, 8
BATCH = GROUPS * MEMBERS
WINDOW = 128
"""Number of sessions in a reported mean reward."""
_MAX_TURNS = 3


class Agents:
    """As many concurrent agents as a batch has trajectories. Each call of a tool takes a log-normal time with this
    median and sigma; the n-th session draws the same times in both ways."""

    def __init__(self, url: str, key: str, *, seed: int, median: float, sigma: float) -> None:
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=5,
            http_client=DefaultAsyncHttpxClient(limits=_limits(), timeout=120),
        )
        self._problems = iter(problems(seed))
        self._numbers = itertools.count()
        self._seed, self._median, self._sigma = seed, median, sigma
        self._name = uuid.uuid4().hex[:8]
        self._began = time.monotonic()
        self.rewards: deque[float] = deque(maxlen=WINDOW)
        self.sessions = 0
        self.seconds_to: dict[float, float] = {}
        """Seconds until the mean of a window first reached a reward, by reward."""

    @property
    def reward(self) -> float:
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def batches(self, count: int, goal: float, learnt: Callable[[], Awaitable[None]]) -> None:
        """Work synchronously: a batch at a time, and wait for `learnt` after each."""
        for _ in range(count):
            async with asyncio.TaskGroup() as running:
                for _ in range(GROUPS):
                    for session, problem, delay in await self._group():
                        running.create_task(self._attempt(session, problem, delay, goal))
            await learnt()

    async def stream(self, count: int, goal: float) -> None:
        """Work asynchronously: an agent that has finished begins the next session at once."""
        slots = asyncio.Semaphore(BATCH)

        async def attempt(session: Session, problem: Problem, delay: random.Random) -> None:
            try:
                await self._attempt(session, problem, delay, goal)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as running:
            for _ in range(count * GROUPS):
                for number, (session, problem, delay) in enumerate(await self._group_when_free(slots)):
                    if number:
                        await slots.acquire()
                    running.create_task(attempt(session, problem, delay))

    async def aclose(self) -> None:
        await self._client.close()

    async def _group_when_free(self, slots: asyncio.Semaphore) -> list[tuple[Session, Problem, random.Random]]:
        await slots.acquire()
        return await self._group()

    async def _group(self) -> list[tuple[Session, Problem, random.Random]]:
        problem, number = next(self._problems), next(self._numbers)
        name = f"asynchrony-{self._name}-{number}"
        opened = await open_group(self._client, task=problem.expression, group=name, size=MEMBERS, purpose="train")
        delays = [random.Random(f"{self._seed} {number} {member}") for member in range(MEMBERS)]
        return list(zip(opened, [problem] * MEMBERS, delays, strict=True))

    async def _attempt(self, session: Session, problem: Problem, delay: random.Random, goal: float) -> None:
        text = await self._solve(session.client, problem.question, delay)
        reward = score(problem, text)
        await session.post_reward(reward)
        self.rewards.append(reward)
        self.sessions += 1
        if goal not in self.seconds_to and len(self.rewards) == WINDOW and self.reward >= goal:
            self.seconds_to[goal] = self.seconds

    async def _solve(self, client: AsyncOpenAI, question: str, delay: random.Random) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(_MAX_TURNS):
            completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CALCULATOR])
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            # An attempt without a tool call takes the same time: otherwise a policy that guesses would be faster.
            await asyncio.sleep(self._median * delay.lognormvariate(0.0, self._sigma) / 2)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                known = call.type == "function" and call.function.name == "calculator"
                result = calculate(call.function.arguments) if known else "error: the only tool is calculator"  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""


def _limits() -> Any:
    import httpx

    return httpx.Limits(max_connections=2 * BATCH, max_keepalive_connections=2 * BATCH)
