"""`base-rl plan` says whether a model fits, and what would."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.trainer.models.archon.shapes import save_random
from trainer.planning.command import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "qwen3", vocab_size=4096)
    for file in directory.glob("*.safetensors"):
        file.unlink()  # the plan needs the configuration alone
    return str(directory)


def test_what_fits_has_the_status_0(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "--memory", "80"]) == 0
    assert "fits on 1 × 80 GiB as d1" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_with_settings_that_do(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "--memory", "0.05"]) == 1
    said = capsys.readouterr().out
    assert "does not fit on 1 × 0.05 GiB as d1" in said
    proposed = re.search(
        r'what fits: ((?P<gpus>\d+) GPUs, )?layout = "(?P<layout>\w+)"'
        r", batch.max_tokens_per_microbatch = (?P<tokens>\d+)"
        r"(?P<checkpointing>, activation_checkpointing = true)?",
        said,
    )
    assert proposed is not None, said
    options = ["--gpus", proposed["gpus"] or "1", "--layout", proposed["layout"], "--tokens", proposed["tokens"]]
    options += ["--checkpointing"] if proposed["checkpointing"] else []
    assert main(["--model", model, "--memory", "0.05", *options]) == 0


def test_what_fits_nowhere_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "--memory", "0.0001"]) == 1
    assert "no layout fits: train an adapter" in capsys.readouterr().out


def test_the_command_passes_the_status_on(model: str) -> None:
    command = [sys.executable, "-m", "proxy.cli", "plan", "--model", model, "--memory", "0.0001"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 1, answer.stderr
    assert "no layout fits" in answer.stdout
    wrong = subprocess.run([*command, "--layout", "d3"], capture_output=True, text=True, check=False, timeout=120)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "d3" in wrong.stderr
