"""`base-rl launch …`: hand the parts of a run to a cluster's scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.console import ApiKey, finish, out

launch_app = typer.Typer(no_args_is_help=True, help="Start engines and trainer on a cluster.")


@launch_app.callback()
def launch() -> None:
    """Start engines and trainer on a cluster."""


@launch_app.command("slurm")
def launch_slurm(
    config: Annotated[Path, typer.Option(help="TOML file; BASE_RL_SECTION__KEY in the environment overrides it.")],
    trainer: Annotated[bool, typer.Option(help="--no-trainer submits the engines alone.")] = True,
    api_key: ApiKey = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts and end.")] = False,
) -> None:
    """Write batch scripts and submit them: one job for the trainer's ranks, one for each engine.

    The proxy is none of the jobs, because agents need one address for it: start it with `base-rl proxy` where it may
    stay, and name it in `[server] public_url`. `[engine] replicas` is the number of engines, `[slurm]` has time
    limits and resources. Data directory, model and this installation must be on storage that all nodes share. Before
    its time limit a job stops cleanly and is queued again; nothing that was recorded or committed is lost.

    Keys come from the data directory, or from BASE_RL_ADMIN_KEY and BASE_RL_TRAINER__API_KEY. They are in the jobs'
    environment, which Slurm stores, and in no script.
    """
    finish(lambda: _launch(config, api_key, with_trainer=trainer, dry_run=dry_run))


def _launch(config: Path, api_key: str | None, *, with_trainer: bool, dry_run: bool) -> int:
    from proxy.cli.cluster.programs import keys_of_programs, proxy_address
    from proxy.cli.cluster.slurm import job_directory, jobs_of, submit
    from proxy.cli.trainer_process import resolved_by_trainer
    from proxy.settings import load_settings

    settings = load_settings(config)
    url = proxy_address(settings)
    ranks = None
    if with_trainer:
        ranks = resolved_by_trainer(["--config", str(config.resolve())], {})["nproc"]
    jobs = jobs_of(
        settings, config_file=config, url=url, ranks=ranks, with_trainer=with_trainer, working_dir=Path.cwd()
    )
    if dry_run:
        for job in jobs:
            out.print(f"# {job.name}\n{job.script}", soft_wrap=True)
        return 0
    keys = keys_of_programs(settings.server.data_dir, api_key, with_trainer=with_trainer)
    directory = job_directory(settings)
    for job, number in zip(jobs, submit(jobs, directory, {**os.environ, **keys}), strict=True):
        out.print(f"{job.name}: job {number}, log {directory / job.name}.log", soft_wrap=True)
    return 0
