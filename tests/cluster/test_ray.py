"""`base-rl up --ray` on a real Ray cluster of several nodes: a run goes on through lost and removed nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.cluster.outside import Outside, outside, until
from tests.cluster.ray_cluster import ROOT, RayCluster, ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]

SETTINGS = """
[ray]
trainer_nodes = 2
engine_resources = {engines = 1}
trainer_resources = {ranks = 1}
stop_seconds = 20
max_restarts = 0
"""
GROUP = 4
ACTORS = {"calculator-ray-1", "calculator-trainer-0", "calculator-trainer-1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray") / "cluster.log") as found:
        yield found


class Up:
    """`base-rl up --ray`, and the run that it places."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, cluster: RayCluster, run: Outside) -> None:
        self.process = process
        self._log = log
        self._cluster = cluster
        self._run = run

    def report(self) -> str:
        return f"{self._log.read_text(errors='replace')}\n{self._cluster.logs()[-6000:]}"

    def until_said(self, words: str) -> None:
        until(lambda: words in self._log.read_text(), f"it says {words!r}", self.report, self.process)

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank of the trainer, once there is one."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []  # None once it has ended
                is_ours = words[1:3] == ["-m", "trainer"] and str(self._run.config) in words
                if is_ours and process.environ()["RANK"] == str(number):
                    found.append(process)
            return bool(found)

        until(is_there, f"rank {number} runs", self.report, self.process)
        return found[0]

    def until_version(self, number: int) -> None:
        until(lambda: self._run.head() == number, f"version {number}", self.report, self.process)

    def until_serving(self) -> None:
        serves = self._run.serves
        until(lambda: bool(self._run.engines()) and serves(), "the engine serves", self.report, self.process)


@contextmanager
def up(cluster: RayCluster, run: Outside, *options: str, **variables: str) -> Iterator[Up]:
    command = ["-m", "proxy.cli", "up", "--ray", cluster.address, "--config", str(run.config), *options]
    log = run.directory / f"up-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [cluster.python, *command],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
        )
    try:
        yield Up(process, log, cluster, run)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def scale(run: Outside, engines: int) -> None:
    command = ["-m", "proxy.cli", "engines", "scale", "calculator", str(engines)]
    place = ["--data-dir", str(run.directory / "data")]
    subprocess.run([sys.executable, *command, *place], check=True, timeout=60)


def engine_processes(run: Outside) -> list[psutil.Process]:
    """Return the processes of `base-rl engines serve`."""
    found = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [process for process, words in found if "serve" in words and str(run.config) in words]


def states(run: Outside) -> list[str]:
    return [row["state"] for row in run.engines().values()]


def test_a_run_survives_lost_and_removed_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add("e1", CPU=1, engines=1)
    cluster.add("t1", CPU=1, ranks=1)
    cluster.add("t2", CPU=1, ranks=1)
    with outside(tmp_path, SETTINGS) as run, up(cluster, run) as placed:
        placed.until_serving()
        assert cluster.actors() == ACTORS
        run.play(GROUP)
        placed.until_version(1)
        assert "calculator-ray-1 is in the pool" in cluster.logs(), "output is in the actor's log"

        # A node of the trainer is lost in the middle of a step.
        placed.rank(1).suspend()
        run.play(GROUP)
        until(lambda: run.leased() == GROUP, "the trainer has a claim", placed.report, placed.process)
        cluster.lose("t2")
        placed.until_said("calculator-trainer is placed again")
        assert run.head() == 1, "the step was lost"

        # The engine's node is lost to Ray, and new ones come.
        (engine,) = engine_processes(run)
        cluster.lose_raylet("e1")
        cluster.add("t3", CPU=1, ranks=1)
        placed.until_version(2)
        placed.until_said("calculator-ray-1 is placed again")
        until(lambda: not engine.is_running(), "the engine of the lost node ended", placed.report)
        cluster.add("e2", CPU=2, engines=2)
        placed.until_serving()

        # A node leaves as by `ray stop`.
        cluster.add("t4", CPU=1, ranks=1)
        cluster.remove("t1")
        run.play(GROUP)
        placed.until_version(3)

        # A further engine joins, and drains.
        scale(run, 2)
        until(lambda: states(run) == ["ready", "ready"], "two engines are ready", placed.report, placed.process)
        scale(run, 1)
        until(lambda: list(run.engines()) == ["calculator-ray-1"], "one is left", placed.report, placed.process)

        placed.process.terminate()
        assert placed.process.wait(60) == 128 + signal.SIGTERM, placed.report()
        assert run.engines() == {}, "the engine was drained and left the pool"
        run.assert_trained_once(3 * GROUP)


def test_actors_end_with_the_command_and_a_wrong_configuration_ends_it(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add("both", CPU=2, engines=1, ranks=1)
    with outside(tmp_path, SETTINGS.replace("trainer_nodes = 2", "trainer_nodes = 1")) as run:
        with up(cluster, run) as placed:
            until(lambda: len(cluster.actors()) == 2, "both are placed", placed.report, placed.process)
            rank = placed.rank(0)
            with up(cluster, run) as second:
                assert second.process.wait(120) == 1
                assert "the cluster has an actor calculator-" in second.report()
            placed.process.kill()
            placed.process.wait(60)
            until(lambda: not cluster.actors(), "the actors end", placed.report)
            until(lambda: not rank.is_running(), "and their processes", placed.report)
        with up(cluster, run, BASE_RL_TRAINER__DEVICE="cuda") as wrong:
            assert wrong.process.wait(120) == 1
            assert "calculator-trainer-0 cannot run with this configuration" in wrong.report()
            assert "torch finds no CUDA device" in wrong.report()
            until(lambda: not cluster.actors(), "the engine ended as well", wrong.report)


def test_the_number_of_engines_follows_the_load(cluster: RayCluster, tmp_path: Path) -> None:
    more = "max_engines = 2\ncalls_per_engine = 2\nidle_seconds = 3\n"
    cluster.add("engines", CPU=2, engines=2)
    with outside(tmp_path, SETTINGS + more) as run, up(cluster, run, "--no-trainer") as placed:
        placed.until_serving()
        load = threading.Event()

        def call() -> None:
            with httpx.Client(base_url=run.url, timeout=60) as client:
                while not load.is_set():
                    run_key = {"authorization": f"Bearer {run.keys.run_key}"}
                    body = {"model": "calculator", "messages": [{"role": "user", "content": "2 + 2"}]}
                    assert client.post("/v1/chat/completions", json=body, headers=run_key).is_success

        with ThreadPoolExecutor(8) as callers:
            calling = [callers.submit(call) for _ in range(8)]
            try:
                until(lambda: states(run) == ["ready", "ready"], "a second engine", placed.report, placed.process)
            finally:
                load.set()
            for each in calling:
                each.result()
        until(lambda: list(run.engines()) == ["calculator-ray-1"], "one is left", placed.report, placed.process)
        placed.until_said("calculator-ray-2 drains and is removed: no call for 3 s")
