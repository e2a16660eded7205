"""Metrics by name, sinks and profiles of the steps of a loop."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from proxy.contract.claim import EngineReading
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.observe.documented import documented_metrics, name_in_docs
from tests.trainer.serve_trainer import MODULE, trainer_process
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import settings

PHASES = ("claim", "prepare", "update", "publish_and_commit")


def told_to_tensorboard(directory: Path, name: str) -> dict[int, float]:
    events = EventAccumulator(str(directory / "tensorboard" / "run_test"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def ranges(trace: Path) -> list[tuple[str, float, float]]:
    """Return (phase, beginning, end) of each phase in the trace, in order."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("ph") == "X" and event["name"] in PHASES]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in found), key=lambda each: each[1])


def test_every_metric_is_documented_and_every_documented_metric_is_reported(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    reported: set[str] = set()
    for preset in ("ppo", "grpo"):
        proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
        algorithm = {"preset": preset, "kl_coefficient": 0.1, "top_entropy_share": 0.5}
        trainer = start(proxy, settings(tmp_path / preset, algorithm=algorithm))
        trainer.loop.resume()
        for seconds, busy in ((10.0, 1.0), (20.0, 4.0)):
            proxy.engine = EngineReading(process="p", seconds=seconds, busy_seconds=busy)
            trainer.loop.step()
        reported |= {name_in_docs(name) for commit in proxy.commits for name in commit.step.metrics}
    assert reported == documented_metrics() - {
        "mfu",
        "kl_teacher",
        "hindsight_answers",
        "hindsight_ignored",
        "hindsight_shift",
        "seconds_other_runs",
        "mismatch_warning",
    }  # of a GPU, a teacher, texts, several runs, and an engine with wrong log-probabilities
    assert "engine_idle_ratio" not in proxy.commits[0].step.metrics
    assert proxy.commits[1].step.metrics["engine_idle_ratio"] == 0.7


def test_seconds_cover_a_whole_round(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    for _ in range(3):
        trainer.loop.step()
    first, second, third = (commit.step.metrics for commit in proxy.commits)
    assert first["seconds_resume"] > 0
    for metrics in (second, third):
        assert {f"seconds_{phase}" for phase in PHASES} == {name for name in metrics if name.startswith("seconds_")}
        spent = sum(metrics[f"seconds_{phase}"] for phase in PHASES)
        assert metrics["trainer_idle_ratio"] == pytest.approx(metrics["seconds_claim"] / spent)


def test_a_sink_gets_the_metrics_of_the_store(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    configured = settings(tmp_path / "weights", metrics={"sinks": ["tensorboard"], "directory": str(tmp_path)})
    for _ in range(2):
        trainer = start(proxy, configured)
        trainer.loop.resume()
        trainer.loop.step()
        trainer.loop.step()
        trainer.instruments.close()
    for name in ("reward_mean", "trajectories", "seconds_update", "staleness_share_0"):
        stored = {number: commit.step.metrics[name] for number, commit in enumerate(proxy.commits, start=1)}
        assert told_to_tensorboard(tmp_path, name) == pytest.approx(stored)


@pytest.mark.parametrize(("first", "steps", "made"), [(2, 2, 5), (1, 1, 2), (2, 9, 3)])
def test_a_trace_has_the_phases_of_the_chosen_steps(
    start: Start, tiny_model: Path, tmp_path: Path, first: int, steps: int, made: int
) -> None:
    """The last case asks for more steps than there are; the steps so far are written at the end."""
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    profile: dict[str, Any] = {"first": first, "steps": steps, "directory": str(tmp_path / "profiles")}
    trainer = start(proxy, settings(tmp_path / "weights", profile=profile))
    trainer.loop.resume()
    for _ in range(made):
        trainer.loop.step()
    trainer.instruments.close()
    last = min(first + steps - 1, made)
    (trace,) = (tmp_path / "profiles").glob("*/*")
    assert trace.relative_to(tmp_path / "profiles") == Path("run_test", f"v{first}-v{last}-rank0.json")
    found = ranges(trace)
    assert [phase for phase, _, _ in found] == list(PHASES) * (last - first + 1)
    assert all(before[2] <= after[1] for before, after in pairwise(found))
    names = Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    assert names["aten::mm"] > 0


def test_a_directory_that_cannot_be_written_loses_only_the_trace(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    bad: dict[str, Any] = {"first": 1, "steps": 1, "directory": str(tmp_path / "file")}
    sinks = {"sinks": ["tensorboard"], "directory": str(tmp_path / "file")}
    trainer = start(proxy, settings(tmp_path / "weights", profile=bad, metrics=sinks))
    trainer.loop.resume()
    for _ in range(3):
        trainer.loop.step()
    trainer.instruments.close()
    assert proxy.version == 3


HANGING_WANDB = """
import atexit, threading

def hang(*_, **__):
    threading.Event().wait()

atexit.register(hang)
init = hang
class Settings:
    def __init__(self, **_): pass
"""


def test_a_process_ends_in_time_even_if_a_sink_hangs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sink works. The other is a library that hangs when it is used, and again at the exit."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(HANGING_WANDB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stub"), os.environ.get("PYTHONPATH", "")]))
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    log = tmp_path / "log"
    options = (
        "--profile",
        "--set",
        'metrics.sinks=["tensorboard", "wandb"]',
        "--set",
        f"metrics.directory={tmp_path}",
        "--set",
        f"profile.directory={tmp_path / 'profiles'}",
    )
    with (
        proxy.serve() as url,
        trainer_process(url, tmp_path / "weights", log, *options, launcher=MODULE) as process,
    ):
        proxy.wait_for(lambda: len(proxy.commits) >= 6)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert set(told_to_tensorboard(tmp_path, "loss")) >= {1, 2, 3, 4, 5}
    assert [path.name for path in (tmp_path / "profiles").glob("*/*")] == ["v2-v4-rank0.json"]
    text = log.read_text()
    assert "profile written" in text
    assert '"sink": "wandb"' in text
    assert '"hangs": true' in text
