"""The commands of `base-rl` and their options. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from proxy.cli import release_commands as _release_commands  # noqa: F401  (adds commands to `versions`)
from proxy.cli.asking import ask_and_show
from proxy.cli.attempts_command import attempts
from proxy.cli.claims_commands import claims_app
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, Config, DataDir, Url, finish, out
from proxy.cli.db_commands import db_app
from proxy.cli.engines_commands import engines_app
from proxy.cli.erase_commands import erase
from proxy.cli.eval_command import evaluate
from proxy.cli.export_commands import export, import_sessions
from proxy.cli.fit_commands import AS_THEY_ARE, fit
from proxy.cli.init_command import init
from proxy.cli.jobs_commands import jobs_app, worker
from proxy.cli.judges_commands import judges_app
from proxy.cli.keys_commands import keys_app
from proxy.cli.launch_commands import launch_app
from proxy.cli.limits_commands import limits_app
from proxy.cli.plan_commands import plan
from proxy.cli.projects_commands import projects_app
from proxy.cli.proxy_commands import proxy
from proxy.cli.replay_commands import replay
from proxy.cli.rewards_commands import rewards_app
from proxy.cli.runs_commands import runs_app
from proxy.cli.sessions_commands import sessions_app
from proxy.cli.steps_commands import steps_app
from proxy.cli.texts_commands import texts_app
from proxy.cli.train_commands import train
from proxy.cli.versions_commands import versions_app
from proxy.cli.webhooks_commands import webhooks_app

if TYPE_CHECKING:
    from proxy.cli.operations import Operations

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Point your agent at another base_url, post a reward, and it learns.\n\n"
    "`base-rl demo` shows the whole loop; `base-rl up --model DIR` starts it for your own model and agent.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        out.print(importlib.metadata.version("base-rl"))
        raise typer.Exit


@app.callback()
def base_rl(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


app.add_typer(runs_app, name="runs")
app.add_typer(engines_app, name="engines")
app.add_typer(judges_app, name="judges")
app.add_typer(sessions_app, name="sessions")
app.add_typer(steps_app, name="steps")
app.add_typer(versions_app, name="versions")
app.add_typer(claims_app, name="claims")
app.add_typer(keys_app, name="keys")
app.add_typer(projects_app, name="projects")
app.add_typer(limits_app, name="limits")
app.add_typer(rewards_app, name="rewards")
app.add_typer(texts_app, name="texts")
app.add_typer(jobs_app, name="jobs")
app.add_typer(webhooks_app, name="webhooks")
app.add_typer(db_app, name="db")
app.command()(init)
app.command()(attempts)
app.command("eval")(evaluate)
app.add_typer(launch_app, name="launch")
app.command()(train)
app.command()(proxy)
app.command()(worker)
app.command(context_settings=AS_THEY_ARE)(fit)
app.command(context_settings=AS_THEY_ARE)(plan)
app.command()(replay)
app.command()(erase)
app.command()(export)
app.command("import")(import_sessions)


class DemoEngine(StrEnum):
    """Engines that the demo can start."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


@app.command()
def demo(
    engine: Annotated[
        DemoEngine, typer.Option(help="`sglang` needs `make sglang-cpu` or a GPU.")
    ] = DemoEngine.EMBEDDED,
    seed: Annotated[int, typer.Option(help="Seed of the tasks, of sampling and of training.")] = 0,
    keep: Annotated[bool, typer.Option(help="Leave everything up at the end, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="The proxy's port, or the next free one after it.")] = 8080,
    target: Annotated[float, typer.Option(help="End at this mean reward of the last 128 sessions.")] = 0.9,
    time_limit: Annotated[float, typer.Option(help="End after this many seconds of sessions.")] = 300.0,
    data_dir: Annotated[
        Path, typer.Option(help="Data directory; it is emptied at the start of each demo.")
    ] = DEFAULT_DATA_DIR / "demo",
    plain: Annotated[bool, typer.Option(help="Print lines instead of a live table.")] = False,
    train: Annotated[bool, typer.Option(help="--no-train shows that nothing is learnt without the trainer.")] = True,
    shuffle_rewards: Annotated[
        bool, typer.Option(help="Post rewards to the wrong sessions, to show that nothing is learnt.")
    ] = False,
) -> None:
    """Watch an unmodified tool-calling agent learn, on this machine, in about a minute.

    Starts the embedded engine on the shipped tiny checkpoint, the proxy and the trainer; runs
    `agents_examples/calculator` with many sessions at once; ends when the mean reward reaches the target. The exit
    status is non-zero if the reward did not rise by 0.4.
    """
    from proxy.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        engine=engine.value,
        seed=seed,
        keep=keep,
        port=port,
        target=target,
        time_limit=time_limit,
        data_dir=data_dir,
        plain=plain or not sys.stdout.isatty(),
        train=train,
        shuffle_rewards=shuffle_rewards,
    )
    finish(lambda: asyncio.run(run_demo(options, out)))


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Directory or Hugging Face id of the base model.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="embedded, sglang, scripted, or the URL of a running SGLang.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="Rules of --engine scripted; default: it repeats the last message.")
    ] = None,
    config: Config = None,
    run: Annotated[str | None, typer.Option(help="The run's name: the `model` that agents ask for.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 8080.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory with database, weights, keys and logs.")] = None,
    trainer: Annotated[
        bool | None, typer.Option(help="--no-trainer serves and records without training.", show_default="trainer")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes of the trainer; default: [trainer] nproc, or 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling and training; default: [trainer] seed.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved configuration and end.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Place engines and trainer on this Ray cluster; `auto`: this node's."),
    ] = None,
) -> None:
    """Start engine, proxy and trainer for your own model and agent, and keep them up until Ctrl-C.

    A part that dies is restarted. All state is in the data directory, so a later start continues where this one
    ended. The options are stored there too: `base-rl up`, or `base-rl up --data-dir DIR`, starts again with the same
    ones, and an option that is given replaces the stored one.

    `--engine scripted` needs no model and no GPU: it answers by the rules of a script, to check an agent's wiring.

    `--ray ADDRESS --config FILE` places the engines and the trainer of a configuration on a Ray cluster, for a proxy
    that runs at `[server] public_url` (`base-rl proxy`). `[engine] replicas` is the number of engines, `[ray]` has
    CPUs, GPUs, nodes and ranks. Actors have the names of their engines and ranks. Lost ones are placed again, and
    the run goes on; Ctrl-C drains the engines and lets the trainer give its claims back. `base-rl[ray]` and the
    files of data directory and model must be on every node.
    """
    from proxy.cli.up import UpOptions, run_up

    given: dict[str, dict[str, Any]] = {
        "server": {"host": host, "port": port, "data_dir": data_dir},
        "engine": {"kind": engine, "script": script},
        "run": {"name": run, "model": model},
    }
    overrides = {
        section: {key: value for key, value in keys.items() if value is not None} for section, keys in given.items()
    }
    options = UpOptions(config=config, overrides=overrides, trainer=trainer, nproc=nproc, seed=seed, dry_run=dry_run)
    if ray is not None:
        from proxy.cli.up_on_ray import run_up_on_ray

        finish(lambda: asyncio.run(run_up_on_ray(ray, options, out)))
    finish(lambda: asyncio.run(run_up(options, out)))


@app.command()
def status(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Show the state of database, engine and trainer. The exit status is 1 if calls are not served."""
    from proxy.cli.drawing import health_table

    async def ask(base_rl: Operations) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        health = await base_rl.health()
        # Without its store a proxy cannot list runs, and the health view reports the store already.
        return health, await base_rl.runs() if health["database"] == "ok" and not as_json else []

    def show(found: tuple[dict[str, Any], list[dict[str, Any]]]) -> int:
        health, runs = found
        if as_json:
            out.print_json(json.dumps(health))
        else:
            out.print(health_table(health, runs))
        return 0 if health["ready"] else 1

    ask_and_show((data_dir, url, api_key), ask, show)


@app.command()
def doctor(
    config: Config = None,
    engine: Annotated[str | None, typer.Option(help="embedded, sglang, scripted, or a URL.")] = None,
    port: Annotated[int | None, typer.Option(help="The port that the proxy would take.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The data directory that would be used.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check Python, packages, disk, port, database, engine, torch and GPU, with a remedy for each failure."""

    def show() -> int:
        from proxy.cli.doctor import Verdict, examine
        from proxy.settings import load_settings
        from proxy.tokens.formats import check_tool_parser

        given: dict[str, dict[str, Any]] = {
            "engine": {"kind": engine},
            "server": {"port": port, "data_dir": data_dir},
        }
        overrides = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in given.items()
        }
        failures = 0
        findings = []
        marks = {Verdict.OK: ("✓", "green"), Verdict.NOTE: ("•", "yellow"), Verdict.FAIL: ("✗", "red")}
        settings = load_settings(config, overrides)
        for run in settings.declared_runs:
            check_tool_parser(run.tool_parser)
        for finding in examine(settings):
            failures += finding.verdict is Verdict.FAIL
            if as_json:
                findings.append({key: getattr(finding, key) for key in ("name", "verdict", "detail", "remedy")})
                continue
            name = Text.assemble(marks[finding.verdict], " ", (f"{finding.name:<10} ", "bold"))
            out.print(name, end="")
            out.print(finding.detail, soft_wrap=True)
            if finding.remedy:
                out.print("             do: ", style="bold", end="")
                out.print(finding.remedy, soft_wrap=True)
        if as_json:
            out.print_json(json.dumps(findings))
        return 1 if failures else 0

    finish(show)


@app.command()
def version() -> None:
    """Print the version, as `base-rl --version` does."""
    _print_version(True)


def main() -> None:
    app()
