"""Check that all sides of the training benchmark make the same step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trainer import report, workloads
from benchmarks.trainer.__main__ import measure, result_of
from benchmarks.trainer.systems import Ours, their_step
from tests.trainer.tiny import save_tiny_model
from trainer.config import Packing

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and accelerate about themselves


@pytest.mark.parametrize("make", [workloads.single_turn, workloads.branching])
def test_every_system_finds_the_same_gradient(
    make: Callable[..., workloads.Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "VOCABULARY", 64)
    monkeypatch.setattr(workloads, "GROUP", 2)
    save_tiny_model(tmp_path)
    ours = Ours(tmp_path, make(random.Random(0), 2))
    steps = {packing.value: ours.step(packing) for packing in Packing}
    steps["trl"] = their_step(tmp_path, ours.workload, tmp_path)
    seconds, norms = measure(steps, 1)
    assert list(seconds) == list(report.SYSTEMS)
    assert min(seconds.values()) > 0
    assert norms == pytest.approx(dict.fromkeys(report.SYSTEMS, norms["padded"]), rel=1e-4)
    assert norms["padded"] > 0.01


def test_the_report_compares_the_quantities_of_the_targets() -> None:
    by_workload: dict[str, Any] = {
        name: {"trained_tokens": 100, "cpu_s": {"padded": 2.0, "packed": 4.0, "tree": 1.0, "trl": 5.0}}
        for name in workloads.WORKLOADS
    }
    peaks = {"chunked": {"8 x 2": 10.0, "8 x 4": 13.0}, "whole": {"8 x 2": 20.0}}
    result = result_of(1000, 5, by_workload, peaks)
    assert (result["packed_vs_trl"], result["tree_vs_packed"]) == (1.25, 4.0)
    assert [target.reached for target in report.judged(result)] == [False, True, False]
    assert report.page_rows(result)[0] == ["single turn", "50", "25", "100", "20"]
    assert report.memory_rows(result) == [["8 × 2", "10", "20"], ["8 × 4", "13", "–"]]
    assert "NOT REACHED" in report.shown(result)
