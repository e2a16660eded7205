"""A test harness: let the agent attempt many problems at once, score its answers and post the rewards.

This is everything that a user of base-rl writes in addition to the agent: open a session, run the agent in it, post a
number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from agents_examples.calculator.agent import solve
from agents_examples.calculator.progress import Progress
from agents_examples.calculator.sessions import Session, open_group
from agents_examples.calculator.shuffling import RewardShuffler
from agents_examples.calculator.tasks import Problem, problems, score

CANCEL_SECONDS = 5.0
PAUSE_AFTER_FAILURE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule of the attempts. `concurrency` bounds the sessions in which the agent works at the same time."""

    model: str = "calculator"
    group_size: int = 8
    concurrency: int = 64
    purpose: str = "train"
    json_lines: bool = False


class Harness:
    """Opens a group of sessions per problem, and keeps as many of them running as the plan allows."""

    def __init__(
        self,
        client: AsyncOpenAI,
        plan: Plan,
        progress: Progress,
        shuffler: RewardShuffler[Session] | None = None,
    ) -> None:
        """`client` has the run's key. It should not retry, so that a failed call is seen as one."""
        self._client = client
        self._plan = plan
        self._progress = progress
        self._shuffler = shuffler
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._name = uuid.uuid4().hex[:8]
        self._open: dict[str, Session] = {}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `run` early. Running sessions are cancelled."""
        self._stopping.set()

    async def run(self, tasks: Iterable[Problem]) -> None:
        """Return after every problem was attempted, or soon after `stop`.

        Raises openai.APIStatusError if the server refuses to open sessions, for example because of a wrong key.
        """
        work = asyncio.create_task(self._attempt_all(tasks))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except* OpenAIError as errors:
            raise errors.exceptions[0] from None
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await self._cancel_open_sessions()
            self._progress.write(final=True)

    async def _attempt_all(self, tasks: Iterable[Problem]) -> None:
        async with asyncio.TaskGroup() as running:
            for index, problem in enumerate(tasks):
                for session in await self._open_group(index, problem):
                    await self._slots.acquire()
                    attempt = running.create_task(self._attempt(session, problem))
                    attempt.add_done_callback(lambda _: self._slots.release())
        if self._shuffler:
            for session, reward in self._shuffler.drain():
                await self._post(session, reward)

    async def _open_group(self, index: int, problem: Problem) -> list[Session]:
        """Open a group, retrying until it succeeds: the server may be restarting."""
        while True:
            async with self._slots:  # open a group only when there is room for its first session
                try:
                    sessions = await open_group(
                        self._client,
                        task=problem.expression,
                        group=f"calculator-{self._name}-{index}",
                        size=self._plan.group_size,
                        purpose=self._plan.purpose,
                    )
                    self._open |= {session.id: session for session in sessions}
                    return sessions
                except OpenAIError as error:
                    self._progress.failed_call(error)
                    if isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code != 429:
                        raise
                    print(f"no session could be opened, trying again: {error}", file=sys.stderr)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)

    async def _attempt(self, session: Session, problem: Problem) -> None:
        try:
            answer = await solve(session.client, self._plan.model, problem.question)
        except OpenAIError as error:
            self._progress.failed_call(error)
            await self._give_up(session)
            await asyncio.sleep(PAUSE_AFTER_FAILURE_SECONDS)
            return
        reward = score(problem, answer.text)
        summary = {"session_id": session.id, "question": problem.question, "reward": reward}
        if self._plan.json_lines:
            print(json.dumps(summary | {"answer": answer.text, "calls": answer.calls}), flush=True)
        self._progress.scored(reward, answer.calls, summary | {"messages": answer.messages})
        due = self._shuffler.exchange(session, reward) if self._shuffler else [(session, reward)]
        for rewarded, value in due:
            await self._post(rewarded, value)

    async def _post(self, session: Session, reward: float) -> None:
        try:
            await session.post_reward(reward)
        except OpenAIError as error:
            self._progress.failed_call(error)
        self._open.pop(session.id, None)

    async def _give_up(self, session: Session) -> None:
        """Report a failed session to the server. If the server does not answer, it will find the session idle."""
        self._open.pop(session.id, None)
        self._progress.failed_sessions += 1
        with contextlib.suppress(OpenAIError):
            await session.end("failed")

    async def _cancel_open_sessions(self) -> None:
        """Cancel the open sessions, as far as possible within a bounded time."""
        sessions = list(self._open.values())
        self._open.clear()
        self._progress.cancelled_sessions += len(sessions)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await asyncio.gather(*(session.end("cancelled") for session in sessions), return_exceptions=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Let the calculator agent attempt problems against a running base-rl, and post its rewards. "
        "Each problem is attempted by a group of sessions at once; their rewards are compared with each other.",
        epilog="Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY (a run's key) if not given. "
        "Ctrl-C or SIGTERM ends it; sessions under way are cancelled and not trained.",
    )
    add = parser.add_argument
    add("--base-url", metavar="URL", help="the server, for example http://127.0.0.1:8080/v1")
    add("--api-key", metavar="KEY", help="the run's key (rl-run-...)")
    add("--model", default="calculator", help="the run's name (default: %(default)s)")
    add("--problems", type=_count, metavar="N", help="stop after this many problems (default: go on until stopped)")
    add("--group-size", type=_count, default=8, metavar="N", help="sessions per problem (default: %(default)s)")
    add("--concurrency", type=_count, default=64, metavar="N", help="sessions at work at once (default: %(default)s)")
    add("--purpose", choices=["train", "eval"], default="train", help="eval: scored, never trained")
    add("--seed", type=int, default=0, help="of the problems (default: %(default)s)")
    add("--shuffle-rewards", action="store_true", help="post rewards to sessions at random: nothing should be learnt")
    add("--report", type=Path, metavar="FILE", help="keep a JSON report of the progress in FILE")
    add("--json-lines", action="store_true", help="print a line of JSON for every finished session")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


async def run(options: argparse.Namespace) -> Progress:
    plan = Plan(
        model=options.model,
        group_size=options.group_size,
        concurrency=options.concurrency,
        purpose=options.purpose,
        json_lines=options.json_lines,
    )
    progress = Progress(options.report)
    shuffler = RewardShuffler[Session](random.Random(options.seed)) if options.shuffle_rewards else None
    async with AsyncOpenAI(
        base_url=options.base_url, api_key=options.api_key, max_retries=0, http_client=DefaultAsyncHttpxClient()
    ) as client:
        harness = Harness(client, plan, progress, shuffler)
        loop = asyncio.get_running_loop()
        for stop_signal in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(stop_signal, harness.stop)
        await harness.run(itertools.islice(problems(options.seed), options.problems))
    return progress


def main() -> None:
    options = parse_arguments()
    try:
        progress = asyncio.run(run(options))
    except OpenAIError as error:
        raise SystemExit(f"error: {error}") from error
    if not options.json_lines:
        summary = {key: value for key, value in progress.as_dict().items() if not key.endswith("_transcript")}
        print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
