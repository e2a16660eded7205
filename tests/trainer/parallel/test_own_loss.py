"""A user's own loss among several processes: the gradient is the same, and no process waits if it fails on one of
them (`make test-ranks`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.parallel.divided import divided, failing
from tests.trainer.tiny import ALONE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

LOSS = """
import os

def loss(inputs):
    return -inputs.advantages_N * inputs.logprobs_N - 0.1 * inputs.entropy_N

def fails_on_one(inputs):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("not here")
    return loss(inputs)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_random(directory, "qwen3")
    return directory


def test_two_updates_equal_those_of_one_process(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    settings = settings_of(backend="fsdp", algorithm={"loss": f"{tmp_path}/mine.py:loss", "mini_batches": 2})
    wanted = two_updates(checkpoint, settings, ALONE)
    assert wanted is not None
    compare(together(2, divided, checkpoint, settings), wanted)


def test_a_failure_on_one_process_skips_the_step_on_all(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    settings = settings_of(backend="fsdp", algorithm={"loss": f"{tmp_path}/mine.py:fails_on_one"})
    stepped, failure, before, after = together(2, failing, checkpoint, settings)
    assert not stepped
    assert failure == f"{tmp_path}/mine.py:9: RuntimeError: not here in fails_on_one"
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
