"""A proxy with engines of its own, as processes under a supervisor."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import Part, Supervisor

CHECKPOINT = Path(__file__).parents[2] / "agents_examples" / "calculator" / "checkpoint"
END_TOKEN = "545"
"""The id of the token that ends the checkpoint's answers."""
HOST = "127.0.0.1"
_READY_S = 300.0
"""Seconds until everything serves: SGLang takes more than a minute on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A running proxy. `admin` is a client with the admin key."""

    port: int
    folder: Path
    supervisor: Supervisor
    admin: httpx.AsyncClient
    trainer_key: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def store(self) -> Path:
        return self.folder / "data" / "base-rl.sqlite3"

    @property
    def weights(self) -> Path:
        return self.folder / "data" / "weights"

    async def key_of(self, run: str) -> str:
        """Return a new key for the run's agents."""
        answer = await self.admin.post("/api/v1/keys", json={"kind": "run", "run": run})
        answer.raise_for_status()
        return str(answer.json()["key"])

    async def health(self) -> dict[str, Any]:
        answer = await self.admin.get("/api/v1/health")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def engine_states(self) -> dict[str, str]:
        """Return the state of each engine by its name."""
        return {each["name"]: each["state"] for each in (await self.health())["engines"]}

    async def until_ready(self) -> None:
        """Wait until every engine serves every run that is placed on it. Raise TimeoutError, PartFailed."""
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            self.supervisor.raise_for_failure()
            try:
                if set((await self.engine_states()).values()) == {"ready"}:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)
        raise TimeoutError(f"not ready after {_READY_S:.0f} s: see the logs in {self.folder / 'logs'}")

    def rows(self, query: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a query on the store."""
        with closing(sqlite3.connect(f"file:{self.store}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query).fetchall()


def quoted(text: object) -> str:
    """Return a TOML string."""
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


@asynccontextmanager
async def installed(
    folder: Path,
    engines: Sequence[Part],
    urls: Sequence[str],
    config: str,
    *,
    engine_kind: str | None = None,
    verbose: bool = False,
) -> AsyncIterator[Installation]:
    """Run a proxy with `config` and the engines that answer at `urls`, until the block ends. Engines begin first.

    `config` is TOML without the sections `server`, `engine` and `bootstrap`. `engine_kind`: `engine.kind`, if it is
    not the default.
    """
    folder.mkdir(parents=True)
    port = random_free_port(HOST)
    admin_key, trainer_key = (f"rl-{kind}-{secrets.token_urlsafe(24)}" for kind in ("admin", "trainer"))
    file = folder / "base-rl.toml"
    kind = "" if engine_kind is None else f"kind = {quoted(engine_kind)}\n"
    file.write_text(
        f"[server]\nport = {port}\ndata_dir = {quoted(folder / 'data')}\n\n"
        f"[engine]\nurl = {quoted(urls[0])}\nreplica_urls = [{', '.join(map(quoted, urls[1:]))}]\n{kind}\n{config}"
    )
    proxy = Part(
        name="proxy",
        argv=(sys.executable, "-m", "proxy", "--config", str(file)),
        env={
            "BASE_RL_BOOTSTRAP__ADMIN_KEY": admin_key,
            "BASE_RL_BOOTSTRAP__RUN_KEY": f"rl-run-{secrets.token_urlsafe(24)}",
            "BASE_RL_BOOTSTRAP__TRAINER_KEY": trainer_key,
        },
    )
    for name in [name for name in os.environ if name.startswith("BASE_RL_")]:
        del os.environ[name]  # settings of whoever runs the benchmark
    began = time.monotonic()

    def listen(part: str, event: str) -> None:
        if verbose:
            print(f"  {time.monotonic() - began:6.1f} s  {part}: {event}", flush=True)

    async with (
        Supervisor([*engines, proxy], folder / "logs", listen) as supervisor,
        httpx.AsyncClient(
            base_url=f"http://{HOST}:{port}", headers={"authorization": f"Bearer {admin_key}"}, timeout=30
        ) as admin,
    ):
        installation = Installation(
            port=port, folder=folder, supervisor=supervisor, admin=admin, trainer_key=trainer_key
        )
        await installation.until_ready()
        yield installation
