"""A base-rl with the scripted engine, started as users start it, and its records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from proxy.cli.local_keys import load_or_make

SCRIPT = Path(__file__).parent / "script.toml"
RUN = "my-agent"
_READY_SECONDS = 90.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A session as the operating API returns it, with the tokens of its turns."""

    view: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.view["session"]["id"])

    @property
    def turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.view["turns"]
        return turns

    @property
    def said(self) -> list[str]:
        """Return the texts of all answers, in order."""
        return [turn["answer"]["content"] or "" for turn in self.turns]

    @property
    def called(self) -> list[tuple[str, dict[str, Any]]]:
        """Return all tool calls, in order: names and arguments."""
        return [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for turn in self.turns
            for call in turn["answer"].get("tool_calls", ())
        ]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A running base-rl. `url` is without `/v1`."""

    url: str
    run: str
    run_key: str
    admin: httpx.Client

    def session_ids(self) -> set[str]:
        listed = self.admin.get(f"/api/v1/runs/{self.run}/sessions", params={"limit": 200}).raise_for_status().json()
        return {session["id"] for session in listed["sessions"]}

    def session(self, session_id: str) -> Recorded:
        answer = self.admin.get(f"/api/v1/sessions/{session_id}", params={"tokens": True}).raise_for_status()
        return Recorded(view=answer.json())


@contextmanager
def running_stack(data_dir: Path, *, run: str = RUN, script: Path = SCRIPT) -> Iterator[Stack]:
    """Run `base-rl up` with the scripted engine on free ports, until the block ends. Images are replaced by `[image]`
    (for llm-comply)."""
    keys = load_or_make(data_dir)
    log = (data_dir / "up.log").open("w")
    command = [sys.executable, "-m", "proxy.cli", "up", "--engine", "scripted", "--script", str(script)]
    command += ["--run", run, "--port", "0", "--data-dir", str(data_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BASE_RL_RUN__IMAGES": "name"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        url = _address(data_dir, process)
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {keys.admin_key}"}, timeout=30) as admin:
            yield Stack(url=url, run=run, run_key=keys.run_key, admin=admin)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def _address(data_dir: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address, once a model call would be served."""
    file = data_dir / "address.json"
    attempts = int(_READY_SECONDS / _LOOK_SECONDS)
    for _ in range(attempts):
        if process.poll() is not None:
            break
        if file.is_file():
            url = str(json.loads(file.read_text())["url"])
            try:
                if httpx.get(f"{url}/readyz").status_code == httpx.codes.OK:
                    return url
            except httpx.TransportError:
                pass
        try:
            process.wait(timeout=_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"base-rl is not ready:\n{(data_dir / 'up.log').read_text()[-4000:]}")
