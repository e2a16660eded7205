"""The whole proxy before two engines' processes, of which one is killed in mid-stream and started again."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from proxy.app import create_app
from proxy.cli.addresses import random_free_port
from proxy.engines.launch import LaunchPlan, scripted_plan
from proxy.settings import EngineSettings
from tests.proxy.calls.world import listening
from tests.proxy.test_app import ADMIN, RUN, settings_for
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running

SCRIPT = """
[defaults]
ms_per_token = 20
[[rule]]
text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
"""
SESSIONS = 8


class EngineProcess:
    """A scripted engine that can be killed and started again at its address."""

    def __init__(self, plan: LaunchPlan, log: Path) -> None:
        self.plan = plan
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.plan.argv, env={**os.environ, **self.plan.env}, stdout=log, stderr=log
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def engines(tmp_path: Path, model: Path) -> Iterator[list[EngineProcess]]:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    ports: set[int] = set()
    while len(ports) < 2:
        ports.add(random_free_port("127.0.0.1"))
    with ExitStack() as stack:
        started = []
        for port in ports:
            plan = scripted_plan(model=str(model), port=port, script=script)
            started.append(EngineProcess(plan, tmp_path / f"{port}.log"))
            stack.callback(started[-1].kill)
        yield started


async def stream(client: httpx.AsyncClient, address: str, session: str, began: asyncio.Event) -> str:
    """Return the whole stream of a call in the session; `began` is set at its first token."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "Count."}], "stream": True}
    text = ""
    headers = {"x-base-rl-session": session}
    async with client.stream("POST", f"{address}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            text += part
            if '"content":"o"' in text.replace(" ", ""):
                began.set()
    return text


async def test_only_streams_on_the_killed_engine_end_and_all_other_calls_succeed(
    tmp_path: Path, model: Path, engines: list[EngineProcess]
) -> None:
    urls = [engine.plan.url for engine in engines]
    section = EngineSettings(kind=urls[0], url=urls[0], replica_urls=(urls[1],), health_interval_seconds=0.05)
    app = create_app(settings_for(tmp_path, model, engine=section))
    async with (
        running(app, key=RUN) as client,
        listening(app) as address,
        httpx.AsyncClient(headers=bearer(RUN), timeout=60) as agent,
    ):

        async def problems() -> list[str]:
            health = (await client.get("/api/v1/health", headers=bearer(ADMIN))).json()
            return [line for line in health["problems"] if "accepts no calls" in line]

        async def until_problems(count: int) -> None:
            async with asyncio.timeout(60):
                while len(await problems()) != count:
                    await asyncio.sleep(0.02)

        await until_problems(0)
        sessions = [f"agent-{number}" for number in range(SESSIONS)]
        began = [asyncio.Event() for _ in sessions]
        streams = [
            asyncio.create_task(stream(agent, address, session, event))
            for session, event in zip(sessions, began, strict=True)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in began))
        engines[0].kill()
        whole = [text for text in await asyncio.gather(*streams) if '"finish_reason":"stop"' in text.replace(" ", "")]
        assert 0 < len(whole) < SESSIONS, "sessions of both engines streamed"
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Count."}]}
        calls = [
            client.post("/v1/chat/completions", json=asked, headers={"x-base-rl-session": session})
            for session in sessions
        ]
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * SESSIONS
        await until_problems(1)
        assert (await client.get("/readyz")).status_code == 200
        engines[0].start()
        await until_problems(0)
        listed = (await client.get("/api/v1/runs/policy/sessions", headers=bearer(ADMIN))).json()["sessions"]
        assert len(listed) == SESSIONS, "no session is doubled"
