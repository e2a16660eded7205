"""`base-rl engines serve` beside a real proxy: joining, dying, being replaced and being removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.cluster.outside import Outside, outside, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]


@contextmanager
def host(run: Outside, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "proxy.cli", "engines", "serve", "far", "--config", str(run.config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--url", run.url, *options],
            env={**os.environ, "BASE_RL_ADMIN_KEY": run.keys.admin_key},
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def test_an_engine_joins_is_restarted_replaced_and_removed(tmp_path: Path) -> None:
    with outside(tmp_path) as run:
        first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
        with host(run, first_log) as first:
            until(run.serves, "the engine serves", first_log.read_text, first)
            run.play(2)
            (engine,) = psutil.Process(first.pid).children()
            engine.kill()
            until(lambda: not run.serves(), "the proxy notices", first_log.read_text, first)
            until(run.serves, "the engine is started again", first_log.read_text, first)

            with host(run, second_log) as second:
                until(lambda: first.poll() is not None, "the first host ends", first_log.read_text, second)
                assert first.returncode == 2, "a scheduler must not start it again"
                assert "took the name far" in first_log.read_text()
                until(run.serves, "the second one serves", second_log.read_text, second)

                for _ in range(2):  # as by Slurm and by the batch script
                    second.send_signal(signal.SIGTERM)
                assert second.wait(60) == 128 + signal.SIGTERM
                assert run.engines() == {}
        with host(run, first_log) as third:
            until(lambda: "far" in run.engines(), "a third one joins", first_log.read_text, third)
            gone = httpx.delete(
                f"{run.url}/api/v1/engines/far?force=true", headers={"authorization": f"Bearer {run.keys.admin_key}"}
            )
            assert gone.status_code == 204, gone.text
            assert third.wait(60) == 0
