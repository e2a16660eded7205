"""Run one example as a user does: `base-rl up` with its checkpoint, and beside it `base-rl attempts`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents_examples import __file__ as _package
from benchmarks.examples.environment import NotInstalled, interpreter_for
from benchmarks.examples.ledger import Ledger, client_of, make_key
from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import die_with_parent

EXAMPLES = Path(_package).parent
WINDOW = 128
"""First and last rewards are means over this many attempts."""

_NEEDED = ("agent.py", "reward.py", "tasks.jsonl", "config.toml", "checkpoint")
_MEASURES = {"debate": "sound", "handoffs": "reward"}
"""The entry of the ledger that is measured for each run of an example with several. Where the reward is relative that
is not the reward: of two sides that learn, at most one wins, however well both argue."""
_CONCURRENCY = 64
_ATTEMPT_SECONDS = 30
_READY_SECONDS = 90.0
_END_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_READY = "Ctrl-C ends it"


class ExampleFailed(Exception):
    """The example could not be run. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """When a run ends: after `attempts`, after `seconds` from the start of the stack, or as soon as the last WINDOW
    attempts of each part, none of which is among the first, have at least the mean reward `enough`."""

    seconds: float = 170.0
    attempts: int = 20_000
    enough: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one run. `rewards` are those of the attempts in the order in which they ended, `failed_calls`
    counts attempts that failed; the examples' agents repeat no call, so that each failed call fails an attempt.
    `seconds` count from the start of the stack to the end of the attempts."""

    rewards: tuple[float, ...]
    failed_calls: int
    seconds: float

    @property
    def first(self) -> float:
        return _mean(self.rewards[:WINDOW])

    @property
    def last(self) -> float:
        return _mean(self.rewards[-WINDOW:])


def names() -> list[str]:
    """Return the examples that can be run, in alphabetical order."""
    return sorted(folder.name for folder in EXAMPLES.iterdir() if all((folder / name).exists() for name in _NEEDED))


def run(name: str, *, seed: int, bounds: Bounds) -> dict[str, Measured]:
    """Run an example in a data directory of its own, which is emptied first, and return what was measured: under the
    example's name, and for each further run of its configuration under `NAME-RUN`. Raise ExampleFailed."""
    folder, directory = EXAMPLES / name, Path(".base-rl") / "examples" / f"{name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        python = interpreter_for(folder)
    except NotInstalled as error:
        raise ExampleFailed(f"{name}: its packages cannot be installed: {error}") from error
    began = time.monotonic()
    with _stack(folder, directory, seed):
        rewards, failed = _attempt(python, folder, directory, seed, bounds, until=began + bounds.seconds)
        seconds = time.monotonic() - began
    if not all(rewards.values()):
        raise ExampleFailed(f"{name}: no attempt ended with a reward; see {directory}")
    return {
        part: Measured(rewards=tuple(found), failed_calls=failed, seconds=seconds) for part, found in rewards.items()
    }


@contextlib.contextmanager
def _stack(folder: Path, directory: Path, seed: int) -> Iterator[None]:
    """Keep engine, proxy and trainer up during the block."""
    log = directory / "up.log"
    command = [sys.executable, "-m", "proxy.cli", "up", "--data-dir", str(directory), "--seed", str(seed)]
    command += ["--model", str(folder / "checkpoint"), "--config", str(folder / "config.toml")]
    command += ["--port", str(random_free_port("127.0.0.1"))]
    with log.open("wb") as file, _started(command, file) as process:
        until = time.monotonic() + _READY_SECONDS
        while _READY not in log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise ExampleFailed(f"base-rl up did not get ready:\n{log.read_text()[-2000:]}")
            time.sleep(_LOOK_SECONDS)
        print(
            *(line for line in log.read_text().splitlines() if line.startswith(("admin page", "its key"))), flush=True
        )
        yield


def _attempt(
    python: str, folder: Path, directory: Path, seed: int, bounds: Bounds, *, until: float
) -> tuple[dict[str, list[float]], int]:
    """Let the agent attempt the tasks until a bound is reached. Return what was measured of each part, and the number
    of failed attempts.

    Of an example with a function `evaluate` beside `reward`, the trained attempts have no rewards of their own. Then
    half of the attempts are evaluations, which `evaluate` scores and nobody trains; theirs are measured.
    """
    purposes = ["reward", "evaluate"] if is_evaluated(folder.name) else ["reward"]
    journals = [directory / f"{purpose}.jsonl" for purpose in purposes]
    others = tomllib.loads((folder / "config.toml").read_text()).get("runs", {})
    keys = {f"{other.upper()}_API_KEY": make_key(directory, other) for other in others}
    parts = _parts(folder.name, directory, journals[-1], others)
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(
                _started([python, *_command(folder, directory, seed, purpose, journal, len(purposes))], None, keys)
            )
            for purpose, journal in zip(purposes, journals, strict=True)
        ]
        while True:
            rewards = {part: read() for part, read in parts.items()}
            failed = sum(read_journal(journal)[1] for journal in journals)
            if (
                all(reached(found, bounds) for found in rewards.values())
                or len(rewards[folder.name]) + failed >= bounds.attempts
                or time.monotonic() > until
            ):
                return rewards, failed
            for process in processes:
                if process.poll() is not None:
                    raise ExampleFailed(f"base-rl attempts ended with status {process.returncode}")
            time.sleep(_LOOK_SECONDS)


def _parts(name: str, directory: Path, journal: Path, others: Iterable[str]) -> dict[str, Callable[[], list[float]]]:
    """Return how to read what is measured of each part: the rewards in the journal, or entries of the ledger."""
    if name not in _MEASURES:
        return {name: lambda: read_journal(journal)[0]}
    runs = {name: name, **{f"{name}-{other}": other for other in others}}
    client = client_of(directory)
    return {part: Ledger(client, run_name, _MEASURES[name]).read for part, run_name in runs.items()}


def is_evaluated(name: str) -> bool:
    """Return whether an example measures attempts that are not trained."""
    return hasattr(importlib.import_module(f"agents_examples.{name}.reward"), "evaluate")


def _command(folder: Path, directory: Path, seed: int, purpose: str, journal: Path, commands: int) -> Sequence[str]:
    """Return the arguments of Python for one of several commands that make attempts without end. The function
    `purpose` scores them."""
    run_name = tomllib.loads((folder / "config.toml").read_text())["run"]["name"]
    module = f"agents_examples.{folder.name}"
    command = ["-m", "proxy.cli", "attempts", run_name, "--tasks", str(folder / "tasks.jsonl")]
    command += ["--function", f"{module}.agent:attempt", "--reward", f"{module}.reward:{purpose}"]
    command += ["--passes", "0", "--shuffle", str(seed), "--concurrency", str(_CONCURRENCY // commands)]
    command += ["--timeout", str(_ATTEMPT_SECONDS), "--journal", str(journal), "--data-dir", str(directory)]
    return [*command, "--eval", "--group-size", "1"] if purpose == "evaluate" else command


def read_journal(path: Path) -> tuple[list[float], int]:
    """Return the rewards in a journal of `base-rl attempts`, and the number of failed attempts in it."""
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []  # the first names the series
    finished = [json.loads(line) for line in lines]
    return (
        [float(each["reward"]) for each in finished if each["reward"] is not None],
        sum(each["problem"] is not None for each in finished),
    )


def reached(rewards: Sequence[float], bounds: Bounds) -> bool:
    return len(rewards) >= 2 * WINDOW and _mean(rewards[-WINDOW:]) >= bounds.enough


@contextlib.contextmanager
def _started(
    command: Sequence[str], output: object, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and at the end of the block end it, by force after half a minute."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT if output is not None else None,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509  this process has no other threads
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
