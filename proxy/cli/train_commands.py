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
# Seconds for a process to end after the first signal. During a step it cannot handle the signal: it is killed, and
# the next trainer gives its claims back.
_STOP_SECONDS = 1.5
# Seconds for a trainer with metric sinks, which waits five seconds for them.
_STOP_SECONDS_WITH_SINKS = 6.5


def train(
    config: Config = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="Run to train; repeat it to train several in turns. Default: [trainer.runs], [trainer] run, or"
            " [run] name."
        ),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES", help='Names with commas between them, or "all": every active run of the proxy.'
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
        Path | None, typer.Option(help="Data directory of the base-rl to train for; default: [server] data_dir.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")] = False,
) -> None:
    """Train a run from its rewards, or several in fair turns, until Ctrl-C.

    `base-rl up` starts a trainer itself. Start it separately to see its log, to give it more processes or another
    machine, or to change its settings without interrupting serving: `base-rl up --no-trainer` in one terminal,
    `base-rl train --nproc 2` in another. It can be stopped at any time, and continues from the last committed
    version.

    Several processes share the rows of a step and shard the model (`--nproc 2`). With the trainer's own model
    definitions (backend archon), `--layout` divides the work along more axes, each a letter and a number: d rows,
    t heads and MLPs, c the tokens of a row, e experts, p layers, r whole replicas. `d2t2` is for four processes: two
    shares of the rows, each computed by two processes that divide heads and MLPs. If a layout does not fit the model
    or --nproc, the error says what does.

    For a base-rl on this machine, address and key come from its data directory. For another machine, name the proxy
    and give a trainer key of the run: `BASE_RL_TRAINER__API_KEY=… base-rl train --proxy https://…`. Weights are
    written where proxy and engine read them under the same path (`[trainer.weights] directory`).
    """
    arguments = _arguments(config, run or [], runs or [], proxy, layout, nproc, assignments or [], profile=profile)
    finish(lambda: _train(config, data_dir, arguments, dry_run=dry_run))


def _arguments(
    config: Path | None,
    single: Sequence[str],
    lists: Sequence[str],
    proxy: str | None,
    layout: str | None,
    nproc: int | None,
    assignments: Sequence[str],
    *,
    profile: bool,
) -> list[str]:
    """Return the arguments of `python -m trainer`. An option of its own takes precedence over `--set` of the same
    key."""
    arguments = ["--config", str(config.resolve())] if config is not None else []
    for option, names in (("--run", single), ("--runs", lists)):
        for name in names:
            arguments += [option, name]
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
    """Return the environment in which a trainer with these `arguments` finds proxy, run and weights, and its resolved
    configuration without the key. Raises Refused if there is no key for its proxy."""
    from proxy.cli.stack import read_address
    from proxy.cli.trainer_process import resolved_by_trainer, runs_of
    from proxy.settings import load_settings

    settings = load_settings(config, {"server": {"data_dir": data_dir}} if data_dir is not None else {})
    directory = settings.server.data_dir.resolve()
    address = read_address(directory)
    # Defaults of the trainer, which its own section of the configuration overrides.
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
    """Return the data directory's trainer key, if `proxy_url` is its proxy. Raises Refused otherwise."""
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
    """Run a process to its end, forward signals to it, and return its exit status, as a shell would report it.

    It is killed `patience` seconds after the first signal, or at the second; the status is then `when_killed`.
    """
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
    # A session of its own, so that Ctrl-C in the terminal reaches it once, through this process.
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
