"""`base-rl train`: the trainer alone, in the foreground, for a base-rl that is up here or elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.cli.console import Config, Refused, finish, out

if TYPE_CHECKING:
    from proxy.cli.stack import Address

_CLI_STATUS_OF_WRONG_CONFIGURATION = 1
_STOP_SECONDS = 1.5
"""How long a process may take to end after the first signal. In the middle of a step it cannot hear it: it is killed,
and the next trainer gives its claims back."""
_STOP_SECONDS_WITH_SINKS = 6.5
"""A trainer waits five seconds for the sinks of its metrics."""


def train(
    config: Config = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="The run to train; several: in fair turns. Default: all of [trainer.runs], or [trainer] run, or"
            " [run] name."
        ),
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the proxy; default: the one of --data-dir.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="How the processes divide a model, as d2t2; default: [trainer] layout."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that train together; default: [trainer] nproc, what the layout is for, or 1."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of [trainer], as `optimizer.learning_rate=1e-6`."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace three steps by torch's profiler, into the data directory.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Of the base-rl that is trained for; default: [server] data_dir.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")] = False,
) -> None:
    """Train a run from its rewards, or several in fair turns, until Ctrl-C.

    `base-rl up` does this by itself. Start the trainer apart to see its log, to give it more processes or a machine
    of its own, or to change what it does without a break in serving: `base-rl up --no-trainer` in one terminal,
    `base-rl train --nproc 2` in another. It may be ended and started at any time: what was committed stays, and it
    goes on from the head.

    Several processes share the rows of a step and shard the model (`--nproc 2`). Models of which the trainer has
    definitions of its own (backend archon) are divided along more axes: `--layout d2t2` is for four processes, two
    shares of the rows (d) of which two processes divide heads and MLPs (t). c divides the tokens of a row, e the
    experts, p the layers, and r repeats the whole. A layout that the model or --nproc does not fit is refused with
    one that would.

    Beside a base-rl on this machine, address and key are those of its data directory. Elsewhere, name the proxy and
    give a trainer key of the run: `BASE_RL_TRAINER__API_KEY=… base-rl train --proxy https://…`. Weights are written
    where proxy and engine read them under the same path (`[trainer.weights] directory`).
    """
    arguments = _arguments(config, run or [], proxy, layout, nproc, assignments or [], profile=profile)
    finish(lambda: _train(config, data_dir, arguments, dry_run=dry_run))


def _arguments(
    config: Path | None,
    runs: Sequence[str],
    proxy: str | None,
    layout: str | None,
    nproc: int | None,
    assignments: Sequence[str],
    *,
    profile: bool,
) -> list[str]:
    """For `python -m trainer`. What has an option of its own goes before `--set` of the same."""
    arguments = ["--config", str(config.resolve())] if config is not None else []
    for run in runs:
        arguments += ["--run", run]
    for key, value in (("proxy_url", proxy), ("layout", layout), ("nproc", nproc)):
        assignments = [*assignments, f"{key}={value}"] if value is not None else assignments
    for assignment in assignments:
        arguments += ["--set", assignment]
    return [*arguments, "--profile"] if profile else arguments


def _train(config: Path | None, data_dir: Path | None, arguments: Sequence[str], *, dry_run: bool) -> int:
    from proxy.cli.supervisor import WRONG_CONFIGURATION
    from proxy.cli.trainer_process import runs_of, trainer_command

    environment, resolved = connected(config, data_dir, arguments)
    processes = resolved["nproc"] or 1
    if dry_run:
        out.print_json(json.dumps({**resolved, "nproc": processes}))
        return 0
    sinks = any(run["metrics"]["sinks"] for run in runs_of(resolved))
    patience = _STOP_SECONDS_WITH_SINKS if sinks else _STOP_SECONDS
    code = supervised(trainer_command(processes, arguments), environment, patience=patience, when_killed=0)
    return _CLI_STATUS_OF_WRONG_CONFIGURATION if code == WRONG_CONFIGURATION else code


def connected(
    config: Path | None, data_dir: Path | None, arguments: Sequence[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a process of the trainer with these `arguments` needs in its environment to find proxy, run and
    weights, and the configuration that it then has, without the key. Raises Refused where there is no key for its
    proxy."""
    from proxy.cli.stack import read_address
    from proxy.cli.trainer_process import resolved_by_trainer, runs_of
    from proxy.settings import load_settings

    settings = load_settings(config, {"server": {"data_dir": data_dir}} if data_dir is not None else {})
    directory = settings.server.data_dir.resolve()
    address = read_address(directory)
    # The trainer follows these where its own section says nothing else.
    environment = {"BASE_RL_SERVER__DATA_DIR": str(directory)}
    if address is not None:
        environment["BASE_RL_SERVER__PUBLIC_URL"] = address.url
        if address.run is not None and "name" not in load_settings(config).run.model_fields_set:
            environment["BASE_RL_RUN__NAME"] = address.run
    resolved = resolved_by_trainer(arguments, environment)
    without_key = [run["proxy_url"] for run in runs_of(resolved) if not run.pop("api_key")]
    keys = {_own_key(directory, address, url) for url in without_key}
    if keys:
        environment["BASE_RL_TRAINER__API_KEY"] = keys.pop()
    return environment, resolved


def _own_key(data_dir: Path, address: Address | None, proxy_url: str) -> str:
    """The data directory's trainer key, for its own proxy and no other. Raises Refused."""
    from proxy.cli.local_keys import load

    keys = load(data_dir)
    if address is None or keys is None or proxy_url.rstrip("/") != address.url:
        there = f"the base-rl of {data_dir} is at {address.url}" if address else f"no base-rl is up with {data_dir}"
        raise Refused(
            f"no trainer key for {proxy_url}: set BASE_RL_TRAINER__API_KEY to a trainer key of the run, or name the"
            f" data directory of a base-rl on this machine with --data-dir ({there})"
        )
    return keys.trainer_key


def supervised(
    command: Sequence[str], environment: Mapping[str, str], *, patience: float = _STOP_SECONDS, when_killed: int = 130
) -> int:
    """Run a process to its end and pass signals on; return its exit status, or that of a shell where a signal killed
    it. After the first signal it has `patience` seconds, after the second none: it is killed, and the status is
    `when_killed`, as nothing that it was doing counts."""
    from proxy.cli.supervisor import die_with_parent

    process: subprocess.Popen[bytes] | None = None
    received = 0

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if process is None:
            return
        if received == 1:
            process.terminate()
            signal.setitimer(signal.ITIMER_REAL, patience)
        else:
            os.killpg(process.pid, signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, pass_on)
    # A session of its own: Ctrl-C in the terminal reaches it once, through us.
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509  (there is one thread)
    )
    if received:
        process.terminate()
        signal.setitimer(signal.ITIMER_REAL, patience)
    code = process.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if received and code == -signal.SIGKILL:
        return when_killed
    return code if code >= 0 else 128 - code
