"""Adapters over a base divided by FSDP among processes on gloo make the same steps as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models.archon.divided import divided, sharing
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import ALGORITHM, compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.tiny import ALONE
from trainer.loading import load_trained

pytestmark = [pytest.mark.archon, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("size", "changes"),
    [(2, {}), (4, {}), (2, {"activation_checkpointing": True})],
    ids=["2", "4", "2-checkpointing"],
)
def test_two_updates_of_an_adapter_equal_those_of_one_process(
    tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    """The reference is the model without the adapter."""
    save_random(tmp_path, "qwen3")
    settings = settings_of(backend="fsdp", adapter={"rank": 3, "alpha": 6}, **changes)
    wanted = two_updates(tmp_path, settings, ALONE)
    assert wanted is not None
    assert all("lora_" in name for name in wanted["weights"])
    compare(together(size, divided, tmp_path, settings), wanted)


@pytest.mark.parametrize("adapter", [None, {"rank": 3, "alpha": 6}], ids=["whole", "adapter"])
def test_two_updates_with_offloaded_shards_equal_those_of_one_process(
    tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    """On a CPU, shards are offloaded to where they already are: FSDP's code path, without the copy."""
    save_random(tmp_path, "qwen3")
    settings = settings_of(backend="fsdp", adapter=adapter)
    offloaded = settings_of(backend="fsdp", adapter=adapter, offload=True)
    wanted = two_updates(tmp_path, settings, ALONE)
    assert wanted is not None
    compare(together(2, divided, tmp_path, offloaded), wanted)


def test_runs_on_several_ranks_share_one_base_and_train_as_alone(tmp_path: Path) -> None:
    """Two ranks hold one sharded base and three adapters. While one adapter is trained, the tensors and the
    optimiser states of the others stay as they are, bit for bit."""
    save_random(tmp_path, "qwen3")
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2},
        {"seed": 3, "algorithm": {**ALGORITHM, "kl_coefficient": 0.0}},
    ]
    configured = [settings_of(backend="fsdp", adapter={"rank": 3, "alpha": 6}, **kind) for kind in kinds]
    found = together(2, sharing, tmp_path, configured)
    for shared, alone in zip(found["shared"], found["alone"], strict=True):
        assert shared.keys() == alone.keys()
        for name, weight in shared.items():
            torch.testing.assert_close(weight, alone[name], atol=1e-6, rtol=0, msg=name)
    assert not torch.equal(*(next(iter(each.values())) for each in found["shared"][:2]))
    assert found["held"] == found["held_alone"] + 2 * found["adapter"]
    base = sum(weight.numel() for weight in load_trained(tmp_path, settings_of(backend="fsdp"), ALONE).parameters())
    assert found["held_alone"] - found["adapter"] == pytest.approx(base / 2, rel=0.01)
