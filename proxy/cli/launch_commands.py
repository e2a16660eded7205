"""`base-rl launch …`: hand the parts of a run to a cluster's scheduler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.console import ApiKey, Refused, finish, out

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
    from proxy.cli.cluster.slurm import job_directory, jobs_of, submit
    from proxy.cli.trainer_process import resolved_by_trainer
    from proxy.settings import load_settings

    settings = load_settings(config)
    url = settings.server.public_url
    if url is None:
        raise Refused("server.public_url: set it to the address at which the nodes reach the proxy (`base-rl proxy`)")
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
    keys = _keys(settings.server.data_dir, api_key, with_trainer=with_trainer)
    directory = job_directory(settings)
    for job, number in zip(jobs, submit(jobs, directory, {**os.environ, **keys}), strict=True):
        out.print(f"{job.name}: job {number}, log {directory / job.name}.log", soft_wrap=True)
    return 0


def _keys(data_dir: Path, admin_key: str | None, *, with_trainer: bool) -> dict[str, str]:
    """Return the variables with the keys of the jobs. Raises Refused if one is missing."""
    from proxy.cli.local_keys import load

    local = load(data_dir)
    admin = admin_key or (None if local is None else local.admin_key)
    trainer = os.environ.get("BASE_RL_TRAINER__API_KEY") or (None if local is None else local.trainer_key)
    if admin is None or (trainer is None and with_trainer):
        raise Refused(
            f"no keys in {data_dir}: engines need an admin key (BASE_RL_ADMIN_KEY) to join the pool, and the trainer"
            " a trainer key of the run (BASE_RL_TRAINER__API_KEY)"
        )
    keys = {"BASE_RL_ADMIN_KEY": admin}
    return keys if trainer is None else {**keys, "BASE_RL_TRAINER__API_KEY": trainer}
