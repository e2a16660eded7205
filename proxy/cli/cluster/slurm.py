"""Batch scripts for Slurm, and their submission.

Every job has a time limit, before which Slurm sends SIGUSR1 to the script. The script then sends SIGTERM to its
program, waits for it, and puts itself into the queue again: the trainer gives its claims back and resumes from the
head version, an engine is drained and joins the pool again. A program that fails is queued again too, a bounded
number of times, unless its configuration is wrong. After the loss of a node, Slurm itself queues the job again.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from proxy.cli.cluster.programs import (
    TRAINER,
    check_engine,
    check_ranks,
    gpus_of_engine,
    rank_arguments,
    serve_arguments,
)
from proxy.cli.console import Refused
from proxy.private_files import make_directory
from proxy.settings import Settings
from proxy.settings.slurm import SlurmSettings

_SUBMIT_SECONDS = 60.0
_UNSAFE = re.compile(r"[\s%'\"\\]")
# Below the range of outgoing connections; jobs that share a node have different ids.
_FIRST_PORT, _PORTS = 20000, 10000

_SKELETON = """#!/bin/bash
{options}
# Written by `base-rl launch slurm`; a change here is overwritten by the next one.
set -u

stopped=
child=
stop() {{
  stopped=$1
  [ -n "$child" ] && {ask_to_end}
}}
trap 'stop limit' USR1
trap 'stop signal' TERM

{setup}{command} &
child=$!
[ -n "$stopped" ] && stop "$stopped"
# A trap interrupts `wait`, so wait until the program has ended.
while true; do
  wait "$child"
  status=$?
  kill -0 "$child" 2>/dev/null || break
done

again() {{
  echo "base-rl: $1; the job is queued again"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
}}
if [ "$stopped" = limit ]; then
  again "the time limit is near"
elif [ -z "$stopped" ] && [ "$status" -ne 0 ] && [ "$status" -ne 2 ]; then
  echo "$SLURM_JOB_ID" >> {failures}
  [ "$(grep -cx "$SLURM_JOB_ID" {failures})" -le {max_requeues} ] && again "status $status"
fi
exit "$status"
"""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script to submit."""

    name: str
    script: str


def jobs_of(
    settings: Settings, *, config_file: Path, url: str, ranks: int | None, with_trainer: bool, working_dir: Path
) -> list[Job]:
    """Return the jobs of a configuration: its engines, and the trainer.

    `url` is the proxy's address, `ranks` the number of processes that the trainer's configuration asks for (None: any
    number). Raises Refused if the job would start another number of ranks, or for an engine that is not started here.
    """
    check_engine(settings, "Slurm")
    slurm = settings.slurm
    directory = job_directory(settings)
    run = settings.run.name
    jobs = []
    for number in range(1, settings.engine.replicas + 1):
        name = f"{run}-slurm-{number}"
        serve = [sys.executable, *serve_arguments(name, config_file, url)]
        jobs.append(_job(name, directory, slurm, _engine_options(settings), shlex.join(serve), working_dir))
    if not with_trainer:
        return jobs
    check_ranks(ranks, slurm, "slurm")
    name = f"{run}-{TRAINER}"
    restarts = directory / f"{name}.restarts"
    train = [sys.executable, *rank_arguments("trainer.launch.slurm", config_file, url)]
    command = "\n".join(
        (
            'export MASTER_ADDR="$(hostname)"',
            f"export MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))",
            f'export BASE_RL_TRAINER_RESTARTS={shlex.quote(str(restarts))}/"$SLURM_JOB_ID"',
            # A rank that fails leaves the others in a collective: Slurm ends them.
            f"srun --kill-on-bad-exit=1 {shlex.join(train)}",
        )
    )
    # srun itself would kill its tasks at once.
    end = 'scancel --signal=USR1 "$SLURM_JOB_ID.0" 2>/dev/null'
    jobs.append(_job(name, directory, slurm, _trainer_options(slurm), command, working_dir, ask_to_end=end))
    return jobs


def job_directory(settings: Settings) -> Path:
    return (settings.slurm.directory or settings.server.data_dir / "slurm").resolve()


def submit(jobs: list[Job], directory: Path, environment: Mapping[str, str]) -> list[str]:
    """Write the scripts and submit them; return the ids of the jobs. `environment` is that of the jobs, and has the
    keys, which no script contains. Raises Refused with Slurm's reason; jobs submitted before stay submitted."""
    make_directory(directory)
    submitted: list[str] = []
    for job in jobs:
        path = directory / f"{job.name}.sbatch"
        path.write_text(job.script)
        try:
            answer = subprocess.run(
                ["sbatch", "--parsable", str(path)],
                env=dict(environment),
                capture_output=True,
                text=True,
                check=False,
                timeout=_SUBMIT_SECONDS,
            )
        except FileNotFoundError as error:
            raise Refused("there is no sbatch on this machine: run this where Slurm's commands are") from error
        except subprocess.TimeoutExpired as error:
            raise Refused(
                f"sbatch gave no answer within {_SUBMIT_SECONDS:.0f} s: is slurmctld up (`sinfo`)?"
            ) from error
        if answer.returncode != 0:
            before = f"; submitted before: {', '.join(submitted)} (`scancel` ends them)" if submitted else ""
            raise Refused(f"Slurm refuses {path}: {answer.stderr.strip()}{before}")
        submitted.append(answer.stdout.strip().split(";")[0])
    return submitted


def _job(
    name: str,
    directory: Path,
    slurm: SlurmSettings,
    options: list[str],
    command: str,
    working_dir: Path,
    ask_to_end: str = 'kill -TERM "$child" 2>/dev/null',
) -> Job:
    failures = shlex.quote(str(directory / f"{name}.failures"))
    common = [
        f"--job-name={name}",
        f"--output={directory / name}.log",
        "--open-mode=append",
        f"--chdir={working_dir}",
        f"--time={slurm.time_limit_minutes}",
        f"--signal=B:USR1@{slurm.stop_seconds}",
        "--requeue",
        "--export=ALL",
    ]
    common += [f"--partition={slurm.partition}"] if slurm.partition is not None else []
    common += [f"--account={slurm.account}"] if slurm.account is not None else []
    for option in common:
        if _UNSAFE.search(option):
            raise Refused(
                f"{option}: Slurm reads spaces, quotes, % and backslashes in its own way; use a run name, a"
                " slurm.directory and a working directory without them"
            )
    lines = "\n".join(f"#SBATCH {option}" for option in (*common, *options, *slurm.options))
    setup = "".join(f"{line}\n" for line in slurm.setup)
    script = _SKELETON.format(
        options=lines,
        setup=setup,
        command=command,
        ask_to_end=ask_to_end,
        failures=failures,
        max_requeues=slurm.max_requeues,
    )
    return Job(name=name, script=script)


def _engine_options(settings: Settings) -> list[str]:
    slurm = settings.slurm
    gpus = gpus_of_engine(settings, slurm)
    options = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={slurm.engine_cpus}"]
    options += [f"--gres=gpu:{gpus}"] if gpus else []
    return options + ([f"--mem={slurm.engine_memory_gib}G"] if slurm.engine_memory_gib is not None else [])


def _trainer_options(slurm: SlurmSettings) -> list[str]:
    options = [
        f"--nodes={slurm.trainer_nodes}",
        f"--ntasks-per-node={slurm.trainer_ranks_per_node}",
        f"--cpus-per-task={slurm.trainer_cpus_per_rank}",
    ]
    options += [f"--gres=gpu:{slurm.trainer_gpus_per_node}"] if slurm.trainer_gpus_per_node else []
    return options + ([f"--mem={slurm.trainer_memory_gib}G"] if slurm.trainer_memory_gib is not None else [])
