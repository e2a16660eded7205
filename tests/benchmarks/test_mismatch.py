"""Test the measurement of corrections: its wrong engines, its journal and its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.tasks import CHECKPOINT
from benchmarks.mismatch import report
from benchmarks.mismatch.__main__ import add, read
from benchmarks.mismatch.engines import ENGINES, LAG, STEP
from benchmarks.mismatch.run import CORRECTIONS, Found, Run, pause_of
from trainer.config import Correction, MismatchSettings, TrainerSettings
from trainer.loading import load_reference
from trainer.parallel.mesh import Ranks


def logits(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = engine(input_ids=torch.tensor([[1, 2, 3]])).logits
    return found


@pytest.mark.parametrize("fault", list(ENGINES))
def test_each_engine_has_only_its_own_fault(fault: str) -> None:
    alone = Ranks(0, 1, torch.device("cpu"), None)
    inner: Any = load_reference(CHECKPOINT, TrainerSettings(), alone).inner
    before = {name: weight.detach().clone() for name, weight in inner.state_dict().items()}
    after = {name: weight * 0.5 for name, weight in before.items()}
    engine = ENGINES[fault](inner, 0)
    engine.load(before)
    first = logits(engine)
    engine.load(after)
    served = inner.state_dict()
    name = next(name for name, weight in served.items() if weight.dim() > 1)
    if fault == "stale":
        assert served[name].equal(before[name])
        assert logits(engine).equal(first)
        for _ in range(LAG):
            engine.load(after)
        assert inner.state_dict()[name].equal(after[name])
    elif fault == "eight_bits":
        steps = served[name] / STEP
        assert torch.allclose(steps, steps.round(), atol=1e-4)
        assert not served[name].equal(after[name])
    else:
        assert served[name].equal(after[name])
        assert logits(engine).equal(logits(engine)) is (fault == "clean")


def test_the_default_is_the_presets_and_every_correction_is_measured() -> None:
    assert CORRECTIONS["default"] is None
    assert {Correction.SIGNED_TRUNCATE, *CORRECTIONS.values()} == {*Correction, None}


def found(finals: dict[tuple[str, str], list[float]]) -> dict[Run, Found]:
    return {
        Run(fault=fault, correction=correction, seed=seed): Found(
            final=final, acted=0.5, gap=0.25, paused=None, seconds=1.0
        )
        for (fault, correction), values in finals.items()
        for seed, final in enumerate(values)
    }


def test_medians_are_judged() -> None:
    result = report.result_of(
        found(
            {
                ("clean", "default"): [0.9, 0.95, 1.0],
                ("stale", "none"): [0.7, 0.6, 0.99],
                ("noise", "none"): [0.95, 0.9, 0.9],
                ("stale", "default"): [0.92, 0.1, 0.93],
                ("noise", "default"): [0.8, 0.85, 0.95],
            }
        )
    )
    assert result["stale"]["none"]["final"] == [0.7, 0.6, 0.99]
    judged = {each.what: (round(each.measured, 2), each.reached) for each in report.judged(result)}
    assert judged == {
        "lost by the default, noise": (0.1, False),
        "lost by the default, stale": (0.03, True),
        "lost without a correction, worst fault": (0.25, True),
    }
    assert "NOT REACHED  lost by the default, noise: 0.10" in report.shown(result)
    assert ["stale", "`none`", "0.70, 0.60, 0.99", "0.50", "0.25", "–, –, –"] in report.page_rows(result)


def test_without_a_correct_engine_there_is_no_verdict() -> None:
    assert report.judged(report.result_of(found({("stale", "none"): [0.1]}))) == []


def test_a_pause_comes_after_enough_steps_in_a_row() -> None:
    settings = MismatchSettings(pause_above=0.5, steps=2)
    assert pause_of([0.6, 0.4, 0.6, 0.6, 0.1], settings) == 4
    assert pause_of([0.6, 0.5, 0.6], settings) is None


def test_parts_add_up_in_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "there" / "journal.jsonl"
    assert read(journal, "code") == {}
    runs = found({("stale", "none"): [0.5, 0.6]})
    for run, each in runs.items():
        add(journal, "code", run, each)
    with journal.open("a") as file:
        file.write('\n{"code": "cut o')
    assert read(journal, "code") == runs
    assert read(journal, "other code") == {}
