"""Agents that remember what the proxy acknowledged, and retry what it did not."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIConnectionError, APIError, AsyncOpenAI, LengthFinishReasonError
from openai.types.chat import ChatCompletion

_PAUSE_S = 0.1
_TRIES = 400
"""Attempts of one request, with pauses between them: longer than any part takes to restart."""
_ANSWER_S = 20.0


@dataclass
class Promises:
    """The answers and rewards that clients were promised. `turns`: the answer's text by its id; `rewards`: the value
    by the ledger entry's id."""

    turns: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    """Rewards that were posted again: the id of the entry in the first answer, and in the second."""
    failures: int = 0
    given_up: int = 0
    overtaken: list[str] = field(default_factory=list)
    """Ids of turns with two different answers, which must never happen."""

    def answered(self, turn_id: str, text: str) -> None:
        if self.turns.setdefault(turn_id, text) != text:
            self.overtaken.append(turn_id)
        self.turns[turn_id] = text


class Customers:
    """`count` concurrent agents of one run, each with one session after another: one to three questions, streamed or
    not, and a reward for the last turn or for every turn. Some rewards are posted twice, or revised later."""

    def __init__(self, url: str, key: str, run: str, promises: Promises, *, seed: int, count: int) -> None:
        self._promises = promises
        self._run = run
        self._url = url
        self._key = key
        self._seed = seed
        self._count = count
        self._over = asyncio.Event()

    async def work(self) -> None:
        """Work until `finish` is called."""
        async with (
            httpx.AsyncClient(
                base_url=self._url, headers={"authorization": f"Bearer {self._key}"}, timeout=_ANSWER_S
            ) as http,
            AsyncOpenAI(base_url=f"{self._url}/v1", api_key=self._key, max_retries=0, timeout=_ANSWER_S) as openai,
            asyncio.TaskGroup() as agents,
        ):
            for number in range(self._count):
                agent = _Agent(self._promises, http, openai, self._run, self._seed, number)
                agents.create_task(agent.work(self._over))

    def finish(self) -> None:
        """Let every agent end its current session."""
        self._over.set()


class _Agent:
    def __init__(
        self, promises: Promises, http: httpx.AsyncClient, openai: AsyncOpenAI, run: str, seed: int, number: int
    ) -> None:
        self._promises = promises
        self._run = run
        self._http = http
        self._openai = openai
        # Without the run: both runs have sessions of the same names.
        self._name = f"agent-{seed}-{number}"
        self._random = random.Random(f"{run}-{seed}-{number}")

    async def work(self, over: asyncio.Event) -> None:
        sessions = 0
        while not over.is_set():
            sessions += 1
            await self._session(f"{self._name}-{sessions}")

    async def _session(self, session: str) -> None:
        draw = self._random
        messages: list[dict[str, Any]] = []
        turns: list[str] = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            left, right = draw.randrange(100), draw.randrange(100)
            messages.append({"role": "user", "content": f"What is {left} {draw.choice('+-*')} {right}?"})
            answer = await self._asked(session, messages)
            if answer is None:
                self._promises.given_up += 1
                return
            turns.append(answer[0])
            messages.append({"role": "assistant", "content": answer[1]})
        if draw.random() < 0.3:
            for turn in turns:
                await self._rewarded({"turn_id": turn, "reward": draw.random()}, f"{turn}-own")
        first = {"session_id": session, "reward": float(draw.random() < 0.5)}
        await self._rewarded(first, f"{session}-final")
        if draw.random() < 0.1:
            await self._rewarded({**first, "reward": draw.random()}, f"{session}-revised")

    async def _asked(self, session: str, messages: list[dict[str, Any]]) -> tuple[str, str] | None:
        """Return the id and the text of an answer, once one arrived whole."""
        for _ in range(_TRIES):
            try:
                return await (
                    self._streamed(session, messages)
                    if self._random.random() < 0.4
                    else self._whole(session, messages)
                )
            except (APIConnectionError, APIError, httpx.HTTPError):
                self._promises.failures += 1
                await asyncio.sleep(_PAUSE_S)
        return None

    async def _whole(self, session: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
        completion = await self._openai.chat.completions.create(
            model=self._run,
            messages=messages,  # type: ignore[arg-type]
            extra_headers={"X-Base-RL-Session": session},
        )
        text = _said(completion.choices[0].message)
        self._promises.answered(completion.id, text)
        return completion.id, text

    async def _streamed(self, session: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
        stream = self._openai.chat.completions.stream(
            model=self._run,
            messages=messages,  # type: ignore[arg-type]
            extra_headers={"X-Base-RL-Session": session},
        )
        async with stream as events:
            completion: ChatCompletion
            try:
                completion = await events.get_final_completion()
            except LengthFinishReasonError as cut:  # an answer of as many tokens as there may be is one
                completion = cut.completion
        if completion.choices[0].finish_reason is None:
            raise httpx.RemoteProtocolError("the stream ended before its answer")
        text = _said(completion.choices[0].message)
        self._promises.answered(completion.id, text)
        return completion.id, text

    async def _rewarded(self, body: dict[str, Any], key: str) -> None:
        """Post a reward until it is acknowledged, with one idempotency key; one reward in ten is posted once more."""
        entry = await self._posted(body, key)
        if entry is not None and self._random.random() < 0.1:
            again = await self._posted(body, key)
            if again is not None:
                self._promises.repeated.append((entry, again))

    async def _posted(self, body: dict[str, Any], key: str) -> str | None:
        for _ in range(_TRIES):
            try:
                answer = await self._http.post("/v1/feedback", json={**body, "idempotency_key": key})
            except httpx.HTTPError:
                self._promises.failures += 1
            else:
                if answer.status_code in (201, 202):
                    entry = str(answer.json()["rewards"][0])
                    self._promises.rewards[entry] = float(body["reward"])
                    return entry
                if answer.status_code < 500:
                    raise RuntimeError(f"feedback {body} answered {answer.status_code}: {answer.text}")
                self._promises.failures += 1
            await asyncio.sleep(_PAUSE_S)
        self._promises.given_up += 1
        return None


def _said(message: Any) -> str:
    """Join text and calls into one text, for comparison."""
    calls = "".join(f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or ())
    return f"{message.content or ''}{calls}"
