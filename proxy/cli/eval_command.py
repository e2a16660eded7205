"""`base-rl eval`: let an agent attempt fixed tasks with two versions of a run, and give the results to the gate."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.cli.attempts_command import runner_of, shown
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDir, Url, finish, out, where

if TYPE_CHECKING:
    from proxy.cli.attempts.runners import Runner


def evaluate(
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
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Version to evaluate; default: the oldest candidate, or the serving one."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Name of the results; default: release.evaluation.suite, or the file's name.")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, max=1024, help="Attempts per task and version.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Attempts at once.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which an attempt has failed.")] = 300.0,
    watch: Annotated[bool, typer.Option("--watch", help="Go on with each new candidate, until Ctrl-C.")] = False,
    run_key: Annotated[
        str | None, typer.Option(help="Key for the agent's sessions; default: the installation's, or --api-key.")
    ] = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a version and the one that serves on the same tasks, and give the results to the gate `evaluation`.

    The agent is a program or a function as for `base-rl attempts`; its sessions are never trained. The proxy keeps
    the results: attempts that it has are not repeated, so an interrupted evaluation continues.
    """

    def run_it() -> int:
        from proxy.cli.attempts.evaluation import evaluation_plan

        runner = runner_of(command, function, reward)
        plan = evaluation_plan(attempts, concurrency, timeout)
        place = where(data_dir, url, api_key)
        keys = _call_key(data_dir, api_key, run_key) or place[1]
        chosen = _Chosen(run, tasks, suite, version, watch=watch, as_json=as_json)
        return asyncio.run(_evaluate(chosen, plan, runner, place, (place[0], keys)))

    finish(run_it)


class _Chosen:
    """The arguments that say what is evaluated."""

    def __init__(
        self, run: str, tasks: Path, suite: str | None, version: int | None, *, watch: bool, as_json: bool
    ) -> None:
        self.run, self.tasks, self.suite, self.version = run, tasks, suite, version
        self.watch, self.as_json = watch, as_json


def _call_key(data_dir: Path, api_key: str | None, run_key: str | None) -> str | None:
    from proxy.cli.local_keys import load

    if run_key is not None or api_key is not None:
        return run_key
    keys = load(data_dir)
    return None if keys is None else keys.run_key


async def _evaluate(
    wanted: _Chosen, plan: Any, runner: Runner, place: tuple[str, str], call_place: tuple[str, str]
) -> int:
    from proxy.cli.attempts.evaluation import Evaluation, Evaluator, chosen
    from proxy.cli.attempts.task_file import read_tasks
    from proxy.cli.operations import Operations
    from proxy.cli.signals import end_on_signals

    end_on_signals()
    found = read_tasks(wanted.tasks)
    async with Operations(*place) as operations:
        settings = (await operations.run(wanted.run))["settings"]
        suite = wanted.suite or settings["release"]["evaluation"]["suite"] or wanted.tasks.stem
        evaluation = Evaluation(
            run=wanted.run, suite=suite, tasks=found.tasks, plan=plan, runner=runner, call_place=call_place
        )
        evaluator = Evaluator(
            evaluation,
            operations,
            lambda report: contextlib.nullcontext() if wanted.as_json else shown(report, plain=False),
        )
        if wanted.watch:
            await evaluator.watch(lambda *pair: _print(wanted, suite, *pair))
        new_version, old_version = chosen(await operations.versions(wanted.run), wanted.version)
        old = await evaluator.evaluate(old_version)
        new = old if new_version == old_version else await evaluator.evaluate(new_version)
        _print(wanted, suite, new_version, old_version, new, old)
    return 0


def _print(
    wanted: _Chosen,
    suite: str,
    version: int,
    against: int,
    new: Mapping[str, float],
    old: Mapping[str, float],
) -> None:
    from proxy.cli.attempts.evaluation import comparison

    found = comparison(new, old)
    if wanted.as_json:
        out.print_json(json.dumps({"suite": suite, "version": version, "against": against, **found}))
        return
    if version == against:
        out.print(f"version {version}: mean reward {found['mean']:.3f} on {found['tasks']} tasks of {suite!r}")
        return
    out.print(
        f"version {version}: mean reward {found['mean']:.3f} on {found['tasks']} tasks of {suite!r},"
        f" version {against} {found['mean_before']:.3f}; {found['better']} tasks are better, {found['worse']} worse",
        soft_wrap=True,
    )
