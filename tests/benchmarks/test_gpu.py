"""Run the GPU benchmark on a CPU with a tiny model; every part of it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import report
from benchmarks.gpu.__main__ import main
from tests.trainer.dense_kernel import as_on_cuda
from trainer import loading
from trainer.models.archon import model
from trainer.models.archon.model import Block


def test_a_rehearsal_makes_every_step_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_on_cuda(monkeypatch)
    monkeypatch.setattr(model, "compiled_parts", lambda: (Block.before, Block.behind))  # minutes
    monkeypatch.setattr(loading, "check_compiler", lambda device: None)
    output = tmp_path / "gpu.json"
    assert main(["--short", "--device", "cpu", "--output", str(output)]) == 0
    assert not output.exists()
    printed = capsys.readouterr().out
    result = json.loads(printed[printed.index("\n{") :])
    for engine in report.ENGINES:
        found = result["engines"][engine]
        assert found["by_blocks"] is True
        assert found["full_rows"]["tokens"] == found["whole_rows"]["tokens"] == 2 * 64
        assert found["packed"]["tokens"] == 2 * 8 * (64 + 8)
        assert found["tree"]["tokens"] == 2 * (64 + 8 * 8)
        assert found["tree"]["trained_tokens"] == found["packed"]["trained_tokens"] == 2 * 8 * 8
        assert found["tree"]["mfu"] is None
    assert "NOT REACHED" in report.shown(result), "an unknown device has no utilisation"
    assert len(report.step_rows(result)) == 3 * 5


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--output", str(tmp_path / "gpu.json")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert not (tmp_path / "gpu.json").exists()
