"""Models sharded over two and four processes on gloo make the same steps as one process (`make test-ranks`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.parallel.divided import divided
from tests.trainer.tiny import ALONE

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_random(directory, "qwen3")
    return directory


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Any:
    """Return the result of one process."""

    @cache
    def made(**changes: Any) -> Any:
        return two_updates(checkpoint, settings_of(backend="fsdp", **changes), ALONE)

    return made


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}], ids=["kept", "computed_again"])
def test_two_updates_equal_those_of_one_process(
    checkpoint: Path, alone: Any, size: int, changes: dict[str, Any]
) -> None:
    """Compare losses, log-probabilities, gradient norms and weights, with clipping; the state is written and read in
    between."""
    wanted, settings = alone(), settings_of(backend="fsdp", **changes)
    assert min(wanted["norms"]) > settings.optimizer.clip_norm, "gradients are clipped"
    compare(together(size, divided, checkpoint, settings), wanted)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_sharded_bfloat16_is_as_accurate_as_whole(checkpoint: Path, alone: Any, size: int) -> None:
    """The first update equals that of one process in bfloat16 with the same rows. Later ones differ slightly, because
    values round differently."""
    found = together(size, divided, checkpoint, settings_of(backend="fsdp", precision="bfloat16"))
    whole, exact = alone(precision="bfloat16"), alone()
    assert (found["logprobs"][0] - whole["logprobs"][0]).abs().max() < 1e-5
    assert found["norms"][0] == pytest.approx(whole["norms"][0], rel=1e-3)
    assert (found["logprobs"][1] - whole["logprobs"][1]).abs().max() < 0.05
    for name, weight in whole["weights"].items():
        assert (found["weights"][name] - weight).abs().max() < 2e-3, name
    assert 1e-5 < (found["logprobs"][0] - exact["logprobs"][0]).abs().max() < 0.1


def test_a_reference_that_follows_is_sharded_as_the_policy_is(checkpoint: Path, alone: Any) -> None:
    """Its average is part of the state that is written and read between the updates."""
    moving = settings_of(backend="fsdp", reference={"ema": 0.5})
    wanted = two_updates(checkpoint, moving, ALONE)
    assert wanted is not None
    assert wanted["norms"] != alone()["norms"]
    compare(together(2, divided, checkpoint, moving), wanted)
