"""Run the demo as a newcomer does, and two controls whose reward must not rise: no training, and shuffled rewards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.database import assert_whole

# In one group, because two demos that look for the next free port at the same moment may choose the same one.
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(420), pytest.mark.xdist_group("demo")]


def demo(data_dir: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `base-rl demo`. Return exit status, summary and output."""
    result = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "demo", "--plain", "--data-dir", str(data_dir), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    output = result.stdout + result.stderr
    assert (data_dir / "summary.json").exists(), output
    assert_whole(f"sqlite:///{data_dir / 'base-rl.sqlite3'}")
    return result.returncode, json.loads((data_dir / "summary.json").read_text()), output


def test_the_demo_improves_without_a_failed_call(tmp_path: Path) -> None:
    status, summary, output = demo(tmp_path, "--seed", "3")
    assert status == 0, output
    assert summary["first_reward"] <= 0.35
    assert summary["last_reward"] >= 0.90
    assert summary["swaps"] >= 8
    assert summary["failed_calls"] == 0
    assert summary["seconds_to_090"] is not None
    assert 1 <= summary["max_staleness"] <= 4, "asynchronous, and within the bound"
    assert "before" in output
    assert "after" in output


def test_with_the_trainer_stopped_the_reward_does_not_rise(tmp_path: Path) -> None:
    status, summary, output = demo(tmp_path, "--seed", "3", "--no-train", "--time-limit", "10")
    assert status == 1, output
    assert summary["versions"] == 0
    assert summary["turns"] > 256
    assert abs(summary["last_reward"] - summary["first_reward"]) < 0.2


@pytest.mark.exhaustive  # tests/trainer/test_learning.py shows it of the trainer alone, by the same seeds each time
def test_with_shuffled_rewards_the_reward_does_not_rise(tmp_path: Path) -> None:
    """A run on meaningless rewards is a random walk, which takes more steps on a faster machine. The mean of three
    runs stays below what the demo gains at the least with true rewards: 0.55."""
    rises = []
    for seed in ("3", "4", "5"):
        _, summary, output = demo(tmp_path / seed, "--seed", seed, "--shuffle-rewards", "--time-limit", "15")
        assert summary["versions"] >= 4, f"it did train, on rewards that say nothing\n{output}"
        assert summary["seconds_to_090"] is None
        rises.append(summary["last_reward"] - summary["first_reward"])
    assert sum(rises) / len(rises) < 0.4


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(
    sys.platform != "linux", reason="looks at /proc; parts end with a killed supervisor on Linux only"
)
@pytest.mark.parametrize(
    ("signal_", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_demo_leaves_no_process_and_no_traceback(
    tmp_path: Path, signal_: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-u", "-m", "proxy.cli", "demo", "--plain", "--data-dir", str(tmp_path)]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if "reward" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal_)
        assert process.wait(60) == status
        errors.seek(0)
        assert "Traceback" not in errors.read()
    assert len(children) == 4, "engine, proxy, trainer and harness"
    deadline = time.monotonic() + 30
    while remaining := [pid for pid in children if alive(int(pid))]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.05)
    assert_whole(f"sqlite:///{tmp_path / 'base-rl.sqlite3'}")
