"""`base-rl attempts`: let an agent attempt the tasks of a file, and post its rewards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from proxy.cli.console import DEFAULT_DATA_DIR, AsJson, DataDir, Refused, Url, errors, finish, out

if TYPE_CHECKING:
    from proxy.cli.attempts.report import Report
    from proxy.cli.attempts.runners import Runner
    from proxy.cli.attempts.schedule import Plan

_PLAIN_EVERY_S = 10.0


def attempts(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    tasks: Annotated[Path, typer.Option(help="File of tasks: one JSON object per line. `id` names a task.")],
    command: Annotated[
        str | None, typer.Option(help="A program that makes one attempt; its last line is the reward.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="Instead of a program, FILE.py:NAME or module:NAME: attempt(task, session).")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="FILE.py:NAME: reward(task, result) of what the attempt returned or printed.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Ask for this model, such as RUN@12; default: RUN.")] = None,
    group_size: Annotated[int, typer.Option(min=1, max=1024, help="Attempts per task, which are compared.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Attempts at once.")] = 16,
    passes: Annotated[int, typer.Option(min=0, help="Times over all tasks; 0: until Ctrl-C.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which an attempt has failed.")] = 300.0,
    evaluate: Annotated[bool, typer.Option("--eval", help="Score the attempts and never train them.")] = False,
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle the tasks of every pass.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Remember finished attempts here; the same file again continues.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the run or of its project; default: as below.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let an agent attempt the tasks of a file, and post its rewards.

    Every attempt has a session of its own. A program finds it in OPENAI_BASE_URL and OPENAI_API_KEY (or
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY) and its task, as JSON, on standard input and in BASE_RL_TASK.

    The reward is a number, an object or a list of objects of POST /v1/feedback, or nothing. An attempt that crashes,
    hangs or returns something else has failed: its session is not trained, and the others go on.

    Address and key are those of the installation in --data-dir; without one, OPENAI_BASE_URL and OPENAI_API_KEY.

    The exit status is 3 if attempts failed or lines of the file are no tasks.
    """

    def run_it() -> int:
        from proxy.cli.attempts.schedule import Plan

        plan = Plan(
            group_size=group_size,
            concurrency=concurrency,
            passes=passes or None,
            seconds=timeout,
            purpose="eval" if evaluate else "train",
            seed=shuffle,
        )
        runner = runner_of(command, function, reward)
        place = _place(data_dir, url, api_key)
        return asyncio.run(_attempt_all(run, model or run, plan, tasks, runner, place, journal, as_json=as_json))

    finish(run_it)


def runner_of(command: str | None, function: str | None, reward: str | None) -> Runner:
    """Return what makes the attempts. Raise Refused unless exactly one of program and function is given."""
    from proxy.cli.attempts.runners import FunctionRunner, ProgramRunner, load_function

    scoring = None if reward is None else load_function(reward)
    if command is not None and function is None:
        return ProgramRunner(command, scoring)
    if function is not None and command is None:
        return FunctionRunner(load_function(function), scoring)
    raise Refused("name the agent: either --command PROGRAM or --function FILE.py:NAME")


def _place(data_dir: Path, url: str | None, api_key: str | None) -> tuple[str, str]:
    """Return the given address and key, else those of the installation in the data directory, else the environment's.

    The environment comes last because many people have a key of OpenAI's in it, which must go nowhere else.
    """
    from proxy.cli.console import where
    from proxy.cli.local_keys import load

    keys = load(data_dir)
    if keys is not None:
        return where(data_dir, url, api_key or keys.run_key)
    url, api_key = url or os.environ.get("OPENAI_BASE_URL"), api_key or os.environ.get("OPENAI_API_KEY")
    if url is None or api_key is None:
        raise Refused(
            f"there is no installation in {data_dir}: start one with `base-rl up`, or name another with --url and "
            "--api-key, or with OPENAI_BASE_URL and OPENAI_API_KEY"
        )
    return url, api_key


async def _attempt_all(
    run: str,
    model: str,
    plan: Plan,
    tasks: Path,
    runner: Runner,
    place: tuple[str, str],
    journal: Path | None,
    *,
    as_json: bool,
) -> int:
    from proxy.cli.attempts.journal import Journal
    from proxy.cli.attempts.report import Report
    from proxy.cli.attempts.schedule import Schedule
    from proxy.cli.attempts.sessions import SessionClient
    from proxy.cli.attempts.task_file import read_tasks
    from proxy.cli.signals import end_on_signals

    end_on_signals()
    found = read_tasks(tasks)
    for problem in found.problems:
        errors.print(Text(problem, style="yellow"), soft_wrap=True)
    total = None if plan.passes is None else plan.passes * plan.group_size * len(found.tasks)
    with Journal(journal) as remembered:
        report = Report(total, remembered.finished.values())
        try:
            async with SessionClient(*place, run=run, model=model) as client, shown(report, plain=as_json):
                await client.check()
                schedule = Schedule(
                    plan,
                    found.tasks,
                    client=client,
                    runner=runner,
                    journal=remembered,
                    listener=report.add,
                )
                await schedule.run()
        finally:
            if not as_json and not report.is_empty:
                out.print(report.summary(), soft_wrap=True)
    if as_json:
        out.print_json(json.dumps({**report.as_dict(), "bad_lines": list(found.problems)}))
    return 3 if report.failed or found.problems else 0


@contextlib.asynccontextmanager
async def shown(report: Report, *, plain: bool) -> AsyncIterator[None]:
    """Show the progress: one live line in a terminal, a line every ten seconds elsewhere, nothing if `plain`."""
    if plain:
        yield
        return
    live = Live(console=out, transient=True, auto_refresh=False) if out.is_terminal else None

    async def show() -> None:
        while True:
            if live is None:
                await asyncio.sleep(_PLAIN_EVERY_S)
                out.print(report.line(), soft_wrap=True)
            else:
                live.update(Text(report.line(), no_wrap=True), refresh=True)
                await asyncio.sleep(0.25)

    with live or contextlib.nullcontext():
        showing = asyncio.create_task(show())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
