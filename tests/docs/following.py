"""Follow a page as a reader would: in a fresh clone, from top to bottom, in a shell that keeps exported variables.

A command that does not end (`base-rl up`, a trainer, an engine, attempts without end) runs beside the rest until the
page ends, or until the page starts another `base-rl up`; later commands wait until it is ready. The default port is
replaced by a free one, and the key that a page abbreviates by the one that `base-rl up` printed. Everything else runs
unchanged.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxy.cli.addresses import random_free_port
from tests.docs.blocks import PROGRAM, SHELL, Block, commands_of, words_of
from tests.docs.markdown import ROOT

READY_SECONDS = 90.0
COMMAND_SECONDS = 240.0
_KEY = "rl-run-…"
_PRINTED_KEY = re.compile(r"rl-run-[\w-]{20,}")
_PORTS = (8080, 30000)
"""The ports that the pages name."""
_READY = {
    "up": "Ctrl-C ends it",
    "proxy": "answer at http",
    "engines": "is in the pool at",
    "train": "training from",
    "proxy.engines.scripted": "running on http",
    # The first line about its progress, after ten seconds, in which some attempts have ended.
    "attempts": r"(?m)^[1-9]\d* attempts",
}
"""Patterns of the line by which a command says that it is at work."""
_FAILED_ATTEMPTS = re.compile(r"(?m)^\d+ attempts.* \d+ failed$")


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """A command that keeps running. `what` is its key in `_READY`."""

    what: str
    process: subprocess.Popen[bytes]
    log: Path


class Reader:
    """The state of one reader. `output` collects what the commands printed; background commands add theirs when they
    end."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        """`variables` are in the environment of every command."""
        self._given = dict(variables or {})
        self.clone = folder / "clone"
        self.clone.mkdir()
        for path in _tracked():
            (self.clone / path).symlink_to(ROOT / path)
        (self.clone / ".venv").symlink_to(sys.prefix)
        self._environment = folder / "environment.sh"
        self._environment.write_text(f"cd {self.clone}\n")
        self._ports = {port: random_free_port("127.0.0.1") for port in _PORTS}
        self._beside: list[_Beside] = []
        self._key: str | None = None
        self._folder = folder
        self.output = ""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The last ones first: attempts and trainers end quietly only while their proxy is up.
        for beside in reversed(self._beside):
            self._end(beside)
        if kind is None:
            assert _FAILED_ATTEMPTS.search(self.output) is None, self.output[-6000:]

    def follow(self, block: Block) -> None:
        """Run the blocks of a page. Raise AssertionError with the output of a command that failed."""
        code = self._as_here(block.code)
        if block.title is not None:
            (self.clone / block.title).write_text(code)
        elif block.reason is not None or block.language not in (SHELL, PROGRAM):
            return
        elif block.language == PROGRAM:
            (self._folder / "program.py").write_text(code)
            self._run(f"{self.clone}/.venv/bin/python {self._folder}/program.py")
        else:
            for command in commands_of(code):
                self._follow_command(command)

    def _follow_command(self, command: str) -> None:
        what = goes_on(words_of(command))
        if what is None:
            self._run(command)
            return
        if what == "up":  # a reader has one terminal for it
            for beside in [each for each in self._beside if each.what == "up"]:
                self._beside.remove(beside)
                self._end(beside)
        self._start(what, command)

    def _as_here(self, code: str) -> str:
        for port, mine in self._ports.items():
            code = re.sub(rf"(?<=[: ]){port}\b", str(mine), code)
        return code.replace(_KEY, self._key) if self._key is not None else code

    def _run(self, command: str) -> None:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f". {self._environment}\n{command}\n{self._keep()}"],
            env=self._variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        self.output += f"$ {command}\n{ran.stdout}\n"
        assert ran.returncode == 0, f"exit status {ran.returncode} of {command}\n{self.output[-6000:]}{self._logs()}"

    def _keep(self) -> str:
        """Store the exported variables and the working directory of a command for later commands."""
        return f"{{ declare -px; printf 'cd %q\\n' \"$PWD\"; }} > {self._environment}"

    def _start(self, what: str, command: str) -> None:
        log = self._folder / f"{len(self._beside)}-{what}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f". {self._environment}\nexec {command}"],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._beside.append(_Beside(what=what, process=process, log=log))
        until = time.monotonic() + READY_SECONDS
        while re.search(_READY[what], said := log.read_text()) is None:
            assert process.poll() is None, f"{command} ended with {process.returncode}\n{said}{self._logs()}"
            assert time.monotonic() < until, f"{command} is not ready\n{said}{self._logs()}"
            time.sleep(0.05)
        if (key := _PRINTED_KEY.search(said)) is not None:
            self._key = key[0]

    def _variables(self) -> dict[str, str]:
        """Return the environment of a shell without this test's variables; `base-rl` is not on its PATH."""
        own = str(Path(sys.prefix) / "bin")
        path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != own)
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        variables = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        return variables | {"BASE_RL_SERVER__PORT": str(self._ports[8080])} | self._given

    def _logs(self) -> str:
        logs = sorted(self.clone.glob(".base-rl/**/logs/*.log"))
        return "".join(f"\n{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def _end(self, beside: _Beside) -> None:
        beside.process.send_signal(signal.SIGTERM)
        beside.process.wait(30)
        self.output += beside.log.read_text()


def goes_on(words: list[str]) -> str | None:
    """Return the key in `_READY` of a command that does not end by itself, or None for one that ends."""
    if "--help" in words or "--dry-run" in words or not words:
        return None
    if words[0].rpartition("/")[2] == "base-rl" and (
        words[1:2] in (["up"], ["proxy"], ["train"]) or words[1:3] == ["engines", "serve"]
    ):
        return words[1]
    if words[1:3] == ["-m", "proxy.engines.scripted"]:
        return words[2]
    if "attempts" in words and " --passes 0 " in f" {' '.join(words)} ":
        return "attempts"
    return None


def _tracked() -> list[str]:
    """Return the tracked names at the top of the repository."""
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.split()
