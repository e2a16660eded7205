"""A complete installation for tests: engine, proxy and trainer as processes, with the example's agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from proxy.cli.stack import Stack, running_stack, wait_until_ready
from proxy.cli.up import with_model
from proxy.settings import Settings, load_settings
from tests.database import assert_whole

EXAMPLE = Path(__file__).parents[2] / "agents_examples" / "calculator"
PATIENCE_S = 90.0
_LOOK_EVERY_S = 0.02


@dataclass
class Installation:
    """Operations of a test on a running installation."""

    stack: Stack
    data_dir: Path
    heard: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.stack.keys.run_key}"}

    def kill(self, part: str) -> None:
        """Kill a part with SIGKILL; the supervisor starts it again."""
        pid = self.stack.supervisor.pid(part)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def ask_store(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a query directly on the store's file."""
        file = self.data_dir / "base-rl.sqlite3"
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as connection:
            return list(connection.execute(query, parameters))

    def head(self) -> int:
        return int(self.ask_store("SELECT head_version FROM runs")[0][0])

    def serving(self) -> int:
        return int(self.ask_store("SELECT serving_version FROM runs")[0][0])

    async def until(self, condition: Callable[[], bool], *, what: str, patience: float = PATIENCE_S) -> None:
        try:
            async with asyncio.timeout(patience):
                while not condition():
                    self.stack.supervisor.raise_for_failure()
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            logs = {part: self.stack.supervisor.log_tail(part) for part in self.stack.supervisor.parts}
            raise AssertionError(f"not within {patience:.0f} s: {what}\n{json.dumps(logs, indent=1)}") from None

    async def until_ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await wait_until_ready(self.stack)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.stack.url, headers=self.headers, timeout=30)


@asynccontextmanager
async def installation(
    data_dir: Path, *, with_trainer: bool = True, providers: dict[str, Any] | None = None, **run: Any
) -> AsyncIterator[Installation]:
    """Start the example on free ports with `run` over its [run] section and these [providers] of judges' models;
    `base-rl db check` must pass at the end."""
    overrides: dict[str, dict[str, Any]] = {
        "server": {"port": 0, "data_dir": data_dir},
        "run": run,
        "providers": providers or {},
    }
    settings: Settings = load_settings(EXAMPLE / "config.toml", overrides)
    settings = with_model(settings, str(EXAMPLE / "checkpoint"))
    heard: list[str] = []
    async with running_stack(
        settings,
        config_file=EXAMPLE / "config.toml",
        with_trainer=with_trainer,
        seed=0,
        listener=lambda part, what: heard.append(f"{part}: {what}"),
    ) as stack:
        found = Installation(stack=stack, data_dir=data_dir, heard=heard)
        await found.until_ready()
        yield found
    assert_whole(settings.database_url)


@asynccontextmanager
async def agents_at_work(found: Installation, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The example's harness as a process, until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents_examples.calculator.harness", *arguments),
        env={
            **os.environ,
            "OPENAI_BASE_URL": found.stack.base_url,
            "OPENAI_API_KEY": found.stack.keys.run_key,
        },
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()
