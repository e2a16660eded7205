"""A run whose parts are placed by a scheduler: the proxy here, engines and trainer elsewhere."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from proxy.cli.addresses import random_free_port
from proxy.cli.local_keys import LocalKeys, load
from tests.database import assert_whole

EXAMPLE = Path(__file__).parents[2] / "agents_examples" / "calculator"
PATIENCE_S = 120.0
_POLL_S = 0.1

_CONFIGURATION = """
[server]
port = {port}
data_dir = "{data_dir}"
public_url = "http://127.0.0.1:{port}"

[engine]
kind = "embedded"
device = "cpu"

[run]
name = "calculator"
model = "{model}"
max_new_tokens = 8

[trainer]
threads = 1
device = "cpu"
backend = "fsdp"

[trainer.batch]
trajectories = 4

[trainer.algorithm]
truncated = "train"

{more}
"""


class Outside:
    """The proxy of the run and what a test asks it."""

    def __init__(self, directory: Path, config: Path, url: str, keys: LocalKeys) -> None:
        self.directory = directory
        self.config = config
        self.url = url
        self.keys = keys
        self._client = httpx.Client(base_url=url, timeout=30.0)

    def engines(self) -> dict[str, dict[str, Any]]:
        answer = self._client.get("/api/v1/engines", headers=_bearer(self.keys.admin_key))
        return {row["name"]: row for row in answer.json()["engines"]}

    def serves(self) -> bool:
        return self._client.get("/readyz").status_code == 200

    def ask_store(self, query: str) -> list[tuple[Any, ...]]:
        file = self.directory / "data" / "base-rl.sqlite3"
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as connection:
            return list(connection.execute(query))

    def head(self) -> int:
        return int(self.ask_store("SELECT head_version FROM runs")[0][0])

    def play(self, sessions: int) -> None:
        """Record a group of sessions whose rewards differ, so that they are trained."""
        group = f"group-{time.monotonic_ns()}"
        opening = {"task": group, "group": group, "group_size": sessions, "n": sessions}
        opened = self._send(self.keys.run_key, "/v1/sessions", opening)
        for number, session in enumerate(opened["sessions"]):
            body = {"model": "calculator", "messages": [{"role": "user", "content": "2 + 2"}]}
            self._send(session["api_key"], "/v1/chat/completions", body)
            self._send(session["api_key"], "/v1/feedback", {"session_id": session["id"], "reward": number % 2})

    def _send(self, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post(path, json=body, headers=_bearer(key))
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def leased(self) -> int:
        """Return the number of sessions that a trainer holds."""
        return int(self.ask_store("SELECT count(*) FROM sessions WHERE training = 'leased'")[0][0])

    def assert_trained_once(self, sessions: int) -> None:
        """Check that each session was consumed by the one version whose claim it was in."""
        consumed = self.ask_store("SELECT count(*) FROM sessions WHERE consumed_by IS NOT NULL")[0][0]
        in_commits = self.ask_store(
            "SELECT count(*), count(DISTINCT session_id) FROM claimed_sessions JOIN claims ON claims.id = claim_id"
            " WHERE claims.state = 'committed'"
        )[0]
        assert (consumed, *in_commits) == (sessions, sessions, sessions)

    def close(self) -> None:
        self._client.close()


def until(
    condition: Callable[[], bool],
    what: str,
    report: Callable[[], str],
    running: subprocess.Popen[bytes] | None = None,
) -> None:
    """Wait for a condition; fail with the report after PATIENCE_S seconds, or once the process that should run has
    ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert running is None or running.poll() is None, f"ended: {what}\n{report()}"
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}\n{report()}"
        time.sleep(_POLL_S)


@contextmanager
def outside(directory: Path, more: str = "") -> Iterator[Outside]:
    """Start `base-rl proxy` for the example with `more` in its configuration. At the end `base-rl db check` must find
    nothing."""
    port = random_free_port("127.0.0.1")
    data_dir = directory / "data"
    config = directory / "run.toml"
    text = _CONFIGURATION.format(port=port, data_dir=data_dir, model=EXAMPLE / "checkpoint", more=more)
    config.write_text(text)
    url = f"http://127.0.0.1:{port}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASE_RL_")}
    with (directory / "proxy.log").open("wb") as log:
        command = [sys.executable, "-m", "proxy.cli", "proxy", "--config", str(config)]
        process = subprocess.Popen(command, env=kept, stdout=log, stderr=log)
    try:
        until(lambda: _answers(url), "the proxy answers", (directory / "proxy.log").read_text, running=process)
        keys = load(data_dir)
        assert keys is not None
        found = Outside(directory, config, url, keys)
        try:
            yield found
        finally:
            found.close()
    finally:
        process.terminate()
        process.wait(30)
    assert_whole(f"sqlite:///{data_dir / 'base-rl.sqlite3'}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
