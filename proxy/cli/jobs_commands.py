"""`base-rl jobs …`: list, show, retry and cancel background jobs; and `base-rl worker`, which runs them."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, Config, DataDir, Refused, Url, finish, out

jobs_app = typer.Typer(no_args_is_help=True, help="Background jobs: what waits, what failed, and trying again.")

JobArgument = Annotated[str, typer.Argument(help="The job's id, as `jobs list` shows it.")]
OnlyKind = Annotated[str | None, typer.Option(help="Only jobs of this kind.")]
OnlyRun = Annotated[str | None, typer.Option(help="Only jobs of this run.")]

# Characters of an error that the list shows; `jobs show` prints all.
_ERROR_CHARACTERS = 80


class State(StrEnum):
    """The states of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


@jobs_app.command("list")
def jobs_list(
    kind: OnlyKind = None,
    state: Annotated[State | None, typer.Option(help="Only jobs in this state.")] = None,
    run: OnlyRun = None,
    limit: Annotated[int, typer.Option(help="Most entries to list.", min=1, max=200)] = 20,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first. Finished ones are removed after some days."""
    given = {"kind": kind, "state": state, "run": run, "limit": limit}
    wanted = {name: str(value) for name, value in given.items() if value is not None}

    def show(jobs: list[dict[str, Any]]) -> None:
        from proxy.admin.formatting import ago

        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("job", "kind", "state", "attempts", "made", "error"):
            table.add_column(heading, no_wrap=True)
        now = time.time()
        for one in jobs:
            table.add_row(
                one["id"],
                one["kind"],
                one["state"],
                str(one["attempts"]),
                ago(one["created_at"], now),
                (one["error"] or "")[:_ERROR_CHARACTERS],
            )
        out.print(table)

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.jobs(wanted), show, as_json=as_json)


@jobs_app.command("kinds")
def jobs_kinds(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Show every kind of job with its unfinished and dead jobs, and the schedules."""

    def show(found: dict[str, Any]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("kind", "waiting", "running", "failed", "dead", "oldest", "at once"):
            table.add_column(heading, no_wrap=True)
        for one in found["kinds"]:
            counts = [str(one[state]) for state in ("waiting", "running", "failed", "dead")]
            bound = "unknown here" if one["concurrency"] is None else str(one["concurrency"])
            table.add_row(one["kind"], *counts, f"{one['oldest_seconds']:.0f} s", bound)
        out.print(table)
        now = time.time()
        for one in found["schedules"]:
            following = max(0.0, one["next_at"] - now)
            out.print(f"{one['name']}: every {one['every_seconds']:g} s, next in {following:.0f} s")

    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.job_kinds(), show, as_json=as_json)


@jobs_app.command("show")
def jobs_show(
    job: JobArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Show one job as JSON: its payload, its result, and the error of its last attempt."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.job(job),
        lambda found: out.print_json(json.dumps(found)),
    )


@jobs_app.command("retry")
def jobs_retry(
    job: Annotated[str | None, typer.Argument(help="The job's id; or --dead.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Retry dead jobs, up to a thousand, instead of one.")] = False,
    kind: OnlyKind = None,
    run: OnlyRun = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Try a dead, cancelled or failed job again now, with all of its attempts."""
    place = (data_dir, url, api_key)
    if (job is None) == (not dead) or (job is not None and (kind, run) != (None, None)):

        def refuse() -> int:
            raise Refused("name a job, or give --dead, with --kind or --run for some of the dead ones")

        finish(refuse)
    if job is not None:
        name = job
        ask_and_show(
            place, lambda base_rl: base_rl.change_job(name, "retry"), lambda _: out.print(f"{name} is due now")
        )
    wanted = {key: value for key, value in (("kind", kind), ("run", run)) if value is not None}
    ask_and_show(
        place,
        lambda base_rl: base_rl.retry_dead_jobs(wanted),
        lambda found: out.print(f"{found['retried']} dead jobs are due now"),
    )


@jobs_app.command("cancel")
def jobs_cancel(
    job: JobArgument, data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None
) -> None:
    """Cancel a job that is not done. One that runs is interrupted; effects outside may have happened."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.change_job(job, "cancel"),
        lambda _: out.print(f"{job} is cancelled"),
    )


def worker(
    config: Config = None,
    data_dir: Annotated[Path | None, typer.Option(help="Data directory; default: [server] data_dir.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Jobs at the same time; default: [jobs] concurrency.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve /metrics for Prometheus on this port.")
    ] = None,
) -> None:
    """Run background jobs whose ids come through the Redis of `[jobs] broker`.

    Any number of workers may run, also on other machines; each needs the proxies' database and broker. Ctrl-C or
    SIGTERM lets running jobs end.
    """

    def run() -> int:
        from proxy import log
        from proxy.cli.console import print_error
        from proxy.errors import StoreUnavailable
        from proxy.settings import load_settings
        from proxy.worker import run_worker

        settings = load_settings(config, {"server": {"data_dir": data_dir}} if data_dir is not None else None)
        log.configure(settings.server.log_level)
        try:
            run_worker(settings, concurrency=concurrency, metrics_port=metrics_port)
        except StoreUnavailable as error:
            print_error(error.message)
            return 1
        return 0

    finish(run)
