"""The whole proxy with an engine whose process is stopped by a signal and later resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from proxy.app import create_app
from proxy.cli.addresses import random_free_port
from proxy.engines.launch import LaunchPlan, scripted_plan, wait_until_ready
from proxy.settings import EngineSettings
from tests.proxy.test_app import ADMIN, RUN, settings_for
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running

PATIENCE = 0.6
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def process(tmp_path: Path, model: Path) -> Iterator[tuple[LaunchPlan, subprocess.Popen[bytes]]]:
    plan = scripted_plan(model=str(model), port=random_free_port("127.0.0.1"))
    with (tmp_path / "engine.log").open("wb") as log:
        started = subprocess.Popen(plan.argv, env={**os.environ, **plan.env}, stdout=log, stderr=log)
    yield plan, started
    started.send_signal(signal.SIGCONT)
    started.terminate()
    started.wait(30)


async def _until_ready(client: httpx.AsyncClient, *, ready: bool) -> dict[str, str]:
    async with asyncio.timeout(30):
        while (answer := await client.get("/readyz")).status_code != (200 if ready else 503):
            await asyncio.sleep(0.02)
    missing: dict[str, str] = answer.json()["missing"]
    return missing


async def test_a_stopped_engine_is_noticed_named_and_used_again(
    tmp_path: Path,
    model: Path,
    process: tuple[LaunchPlan, subprocess.Popen[bytes]],
) -> None:
    plan, engine = process
    await wait_until_ready(plan.url, timeout=60, process_alive=lambda: engine.poll() is None)
    section = EngineSettings(
        kind=plan.url, url=plan.url, health_interval_seconds=0.05, health_timeout_seconds=PATIENCE, max_concurrency=2
    )
    app = create_app(settings_for(tmp_path, model, engine=section))
    with capture_logs() as logs:
        async with running(app, key=RUN) as client:
            await _until_ready(client, ready=True)
            assert (await client.post("/v1/chat/completions", json=ASKED)).status_code == 200
            engine.send_signal(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            began = loop.time()
            calls = [client.post("/v1/chat/completions", json={**ASKED, "seed": seed}) for seed in range(5)]
            answers = await asyncio.gather(*calls)
            assert loop.time() - began < 20, "nobody waits for the read timeout"
            assert {answer.status_code for answer in answers} <= {503, 504}
            assert all(answer.headers.get("retry-after") for answer in answers if answer.status_code == 503)
            missing = await _until_ready(client, ready=False)
            assert "has not answered for" in missing["engine"]
            health = (await client.get("/api/v1/health", headers=bearer(ADMIN))).json()
            assert any(plan.url in problem for problem in health["problems"])
            assert (await client.post("/v1/chat/completions", json=ASKED)).status_code == 503
            engine.send_signal(signal.SIGCONT)
            await _until_ready(client, ready=True)
            assert (await client.post("/v1/chat/completions", json=ASKED)).status_code == 200
    assert {"engine hung", "engine answers again"} <= {line["event"] for line in logs}
