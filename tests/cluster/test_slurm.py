"""`base-rl launch slurm` on a real Slurm: a run goes on through failures, time limits and lost nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.outside import Outside, outside, until
from tests.cluster.slurm import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = [pytest.mark.slurm, needs_slurm, pytest.mark.timeout(600), pytest.mark.xdist_group("slurm")]

SETTINGS = """
[slurm]
partition = "main"
trainer_nodes = 2
time_limit_minutes = 30
stop_seconds = 60
setup = ["echo prepared"]
"""
GROUP = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def launched(cluster: SlurmCluster, run: Outside, *options: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "launch", "slurm", "--config", str(run.config), *options],
        env={**cluster.environment, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


class Jobs:
    """The jobs of a launched run."""

    def __init__(self, cluster: SlurmCluster, run: Outside, output: str) -> None:
        self.cluster = cluster
        self.run = run
        numbers = {line.split(":")[0]: line.split("job ")[1].split(",")[0] for line in output.splitlines()}
        self.engine, self.trainer = numbers["calculator-slurm-1"], numbers["calculator-trainer"]

    def report(self) -> str:
        logs = (self.run.directory / "data" / "slurm").glob("*.log")
        texts = [f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        return "\n".join([*texts, self.cluster.ask("scontrol", "show", "job")])

    def until_version(self, number: int) -> None:
        until(lambda: self.run.head() == number, f"version {number}", self.report)

    def until_restarted(self, job: str, times: int) -> None:
        def restarted() -> bool:
            found = self.cluster.job(job)
            return int(found["Restarts"]) == times and found["JobState"] == "RUNNING"

        until(restarted, f"job {job} runs for the {times + 1}. time", self.report)


def test_a_run_survives_failures_time_limits_and_lost_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    with outside(tmp_path, SETTINGS) as run:
        jobs = Jobs(cluster, run, launched(cluster, run))
        until(lambda: "calculator-slurm-1" in run.engines() and run.serves(), "the engine serves", jobs.report)
        run.play(GROUP)
        jobs.until_version(1)

        # A rank is lost during a step.
        run.play(GROUP)
        until(lambda: run.leased() == GROUP, "the trainer has a claim", jobs.report)
        cluster.ask("scancel", "--signal=KILL", f"{jobs.trainer}.0")
        jobs.until_restarted(jobs.trainer, 1)
        jobs.until_version(2)

        # The time limit is near: Slurm sends this signal to the scripts.
        cluster.ask("scancel", "--batch", "--signal=USR1", jobs.trainer, jobs.engine)
        until(lambda: not run.engines(), "the engine left the pool", jobs.report)
        jobs.until_restarted(jobs.trainer, 2)
        log = (run.directory / "data" / "slurm" / "calculator-trainer.log").read_text()
        assert "ended by a signal" in log, "claims were given back"
        jobs.until_restarted(jobs.engine, 1)
        until(lambda: bool(run.engines()) and run.serves(), "the engine is back", jobs.report)
        run.play(GROUP)
        jobs.until_version(3)

        # A node of the trainer is lost.
        other = "n2" if cluster.job(jobs.engine)["NodeList"] == "n1" else "n1"
        cluster.lose(other)
        until(lambda: cluster.job(jobs.trainer)["JobState"] == "PENDING", "the job waits for a node", jobs.report)
        run.play(GROUP)
        cluster.bring_back(other)
        jobs.until_version(4)

        cluster.ask("scancel", jobs.trainer, jobs.engine)
        until(lambda: not run.engines(), "the cancelled engine left the pool", jobs.report)
        until(lambda: not cluster.ask("squeue", "--noheader").strip(), "both jobs ended", jobs.report)
        run.assert_trained_once(4 * GROUP)


def test_a_wrong_configuration_is_not_queued_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    with outside(tmp_path, SETTINGS.replace("trainer_nodes = 2", "trainer_nodes = 1")) as run:
        wrong = {**os.environ, "BASE_RL_TRAINER__DEVICE": "cuda"}
        cluster.environment.update(BASE_RL_TRAINER__DEVICE=wrong["BASE_RL_TRAINER__DEVICE"])
        try:
            jobs = Jobs(cluster, run, launched(cluster, run))
        finally:
            del cluster.environment["BASE_RL_TRAINER__DEVICE"]
        until(lambda: cluster.job(jobs.trainer)["JobState"] == "FAILED", "the trainer refuses", jobs.report)
        found = cluster.job(jobs.trainer)
        assert (found["ExitCode"], found["Restarts"]) == ("2:0", "0"), jobs.report()
        cluster.ask("scancel", jobs.engine)
