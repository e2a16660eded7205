"""Compiled layers make the same steps as uncompiled ones (`make test-ranks`, because compilation takes long)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trainer.models.archon.divided import divided
from tests.trainer.models.archon.steps import compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.tiny import ALONE
from trainer.errors import ConfigurationError
from trainer.loading import load_trained

pytestmark = [pytest.mark.archon, pytest.mark.timeout(900)]

FEW_GRAPHS: dict[str, Any] = {
    "algorithm": {"mini_batches": 2},
    "batch": {"packing": "packed", "row_tokens": 11, "max_tokens_per_microbatch": 11},
}
"""No reference, whose weights are frozen, and always one row: each would be two graphs more, and seconds each."""


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_compiled_layers_make_the_steps_of_uncompiled_ones(checkpoint: Any, checkpointing: bool) -> None:
    settings = settings_of(compile=True, activation_checkpointing=checkpointing, **FEW_GRAPHS)
    found = two_updates(checkpoint("qwen3"), settings, ALONE)
    wanted = two_updates(checkpoint("qwen3"), settings_of(**FEW_GRAPHS), ALONE)
    assert found is not None
    assert wanted is not None
    assert any((found["weights"][name] != weight).any() for name, weight in wanted["weights"].items()), "compiled"
    compare(found, wanted)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("qwen3", "d2", marks=pytest.mark.exhaustive),
        ("qwen3", "t2"),
        ("qwen3_moe", "c2e2"),
        ("qwen3", "p2"),
    ],
)
def test_divided_models_are_compiled_too(checkpoint: Any, name: str, layout: str) -> None:
    settings = settings_of(compile=True, layout=layout, **FEW_GRAPHS)
    wanted = two_updates(checkpoint(name), settings_of(**FEW_GRAPHS), ALONE)
    assert wanted is not None
    compare(together(2, divided, checkpoint(name), settings, patience_s=600), wanted)


def test_the_trainer_reports_at_its_start_if_nothing_can_be_compiled(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ConfigurationError, match=r"trainer\.compile: .*RuntimeError: no compiler\)"):
        load_trained(checkpoint("qwen3"), settings_of(compile=True), ALONE)
