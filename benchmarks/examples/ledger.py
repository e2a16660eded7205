"""Read entries of the reward ledger of a run while the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from proxy.cli.console import where

_PAGE = 200
"""The most entries that the proxy lists at once."""


class Ledger:
    """The values that were recorded under one name about a run's sessions, in the order of their arrival."""

    def __init__(self, client: httpx.Client, run: str, name: str) -> None:
        self._client = client
        self._run = run
        self._name = name
        self._values: list[float] = []
        self._newest = 0

    def read(self) -> list[float]:
        """Return all values so far. Only those are requested that came since the last time."""
        new: list[dict[str, Any]] = []
        query: dict[str, Any] = {"name": self._name, "limit": _PAGE}
        while True:
            answer = self._client.get(f"/api/v1/runs/{self._run}/rewards", params=query)
            page = answer.raise_for_status().json()
            unseen = [entry for entry in page["rewards"] if entry["sequence"] > self._newest]
            new += unseen
            if len(unseen) < len(page["rewards"]) or page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        self._values += [float(entry["value"]) for entry in reversed(new)]
        self._newest = max([self._newest, *(entry["sequence"] for entry in new)])
        return list(self._values)


def client_of(data_directory: Path) -> httpx.Client:
    """Return a client, with the admin key, of the installation whose data directory this is. Raise
    proxy.cli.console.Refused if it is not up."""
    address, key = where(data_directory, None, None)
    return httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=30)


def make_key(data_directory: Path, run: str) -> str:
    """Make a key of a run, as a user does. Raise subprocess.CalledProcessError."""
    command = [sys.executable, "-m", "proxy.cli", "keys", "create", "--kind", "run", "--run", run]
    made = subprocess.run([*command, "--data-dir", data_directory], capture_output=True, text=True, check=True)
    return made.stdout.strip()
