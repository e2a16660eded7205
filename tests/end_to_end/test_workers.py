"""`base-rl proxy --workers 2`: calls reach any worker, and a conversation goes on at all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from proxy.cli.addresses import random_free_port
from proxy.cli.local_keys import load
from proxy.engines.scripted.script import MODEL
from tests.database import assert_whole, needs_postgresql, postgresql_database
from tests.end_to_end.test_two_proxies import process, until_ready
from tests.running_app import bearer

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(180)]

MESSAGE = {"role": "user", "content": "hello"}


def test_several_workers_on_sqlite_are_refused_with_what_to_do(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "proxy", "--workers", "2", "--data-dir", str(tmp_path)],
        env={**os.environ, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.returncode == 1
    assert "2 workers need PostgreSQL" in answer.stderr
    assert "database.url" in answer.stderr


async def until_said(log: Path, words: str) -> None:
    async with asyncio.timeout(60):
        while words not in log.read_text():
            await asyncio.sleep(0.05)


@needs_postgresql
async def test_a_conversation_goes_on_at_every_worker_and_over_the_death_of_one(tmp_path: Path) -> None:
    port, own, engine, beside = (random_free_port("127.0.0.1") for _ in range(4))
    with (
        postgresql_database(migrated=False) as url,
        process(["-m", "proxy.engines.scripted", "--port", str(engine)], tmp_path / "engine.log"),
        ExitStack() as stack,
    ):

        def proxy(name: str, *options: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(
                process(
                    ["-m", "proxy.cli", "proxy", *options],
                    tmp_path / f"{name}.log",
                    BASE_RL_SERVER__DATA_DIR=str(tmp_path / "data"),
                    BASE_RL_DATABASE__URL=url,
                    BASE_RL_ENGINE__URL=f"http://127.0.0.1:{engine}",
                    BASE_RL_RUN__MODEL=str(MODEL),
                )
            )

        parent = proxy("proxy", "--workers", "2", "--own-ports", str(own), "--port", str(port))
        workers = [httpx.AsyncClient(base_url=f"http://127.0.0.1:{own + number}", timeout=60) for number in range(2)]
        for worker in workers:
            await until_ready(worker, parent)
        logs = tmp_path / "data" / "logs"
        await until_said(tmp_path / "proxy.log", f"2 worker(s) answer at http://127.0.0.1:{port}, logs in {logs}")
        proxy("beside", "--port", str(beside))
        own_logs = logs / f"{socket.gethostname()}-{beside}"
        await until_said(
            tmp_path / "beside.log", f"1 worker(s) answer at http://127.0.0.1:{beside}, logs in {own_logs}"
        )
        assert {path.name for path in logs.iterdir()} == {own_logs.name, "proxy-1.log", "proxy-2.log"}
        assert [path.name for path in own_logs.iterdir()] == ["proxy.log"]
        keys = load(tmp_path / "data")
        assert keys is not None
        messages: list[dict[str, Any]] = [MESSAGE]
        sessions = set()
        for number in range(6):
            # The shared port by a new connection each time, and both own ports.
            base = port if number % 3 == 2 else own + number % 3
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{base}", timeout=60) as client:
                answer = await client.post(
                    "/v1/chat/completions",
                    json={"model": "policy", "messages": messages},
                    headers=bearer(keys.run_key),
                )
            assert answer.status_code == 200, answer.text
            sessions.add(answer.headers["x-base-rl-session"])
            messages += [answer.json()["choices"][0]["message"], MESSAGE]
        assert len(sessions) == 1

        first = psutil.Process(parent.pid).children()[0]
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        async with asyncio.timeout(60):
            for worker in workers:
                await until_ready(worker, parent)
        metrics = [(await worker.get("/metrics")).text for worker in workers]
        assert all("base_rl_requests_total" in text for text in metrics)
        for worker in workers:
            await worker.aclose()
        parent.terminate()
        parent.wait(30)
        assert_whole(url)
