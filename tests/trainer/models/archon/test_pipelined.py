"""Models whose layers are stages on separate ranks make the same steps as one process (`make test-ranks`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.archon.divided import full, published, refused, several
from tests.trainer.models.archon.steps import compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.tiny import ALONE
from trainer.models.state_dict import read_weights

pytestmark = [pytest.mark.archon, pytest.mark.timeout(900)]

TIED: dict[str, Any] = {"num_hidden_layers": 5}
UNTIED: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": False}
AGAIN = {"activation_checkpointing": True}
TREE = {"batch": {"packing": "tree", "max_tokens_per_microbatch": 31}}
FEW: dict[str, Any] = {"batch": {"packing": "packed", "row_tokens": 400, "max_tokens_per_microbatch": 400}}

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""(model, changes to it, settings)"""

OF_TWO: list[Case] = [
    ("qwen3", TIED, {"layout": "p2"}),
    ("qwen3", UNTIED, {"layout": "p2", **AGAIN}),
    ("qwen3", TIED, {"layout": "p2", **TREE}),
    ("qwen3", TIED, {"layout": "p2", **FEW}),
    ("qwen3", TIED, {"layout": "p2", "pipeline_schedule": "interleaved"}),
    ("qwen3", UNTIED, {"layout": "p2", "pipeline_schedule": "interleaved", **AGAIN, **TREE}),
    ("qwen3", TIED, {"layout": "p2", "pipeline_schedule": "zbv"}),
    ("qwen3", UNTIED, {"layout": "p2", "pipeline_schedule": "zbv", **FEW}),
    ("qwen3_moe", {}, {"layout": "p2"}),
]
OF_FOUR: list[Case] = [
    ("qwen3", TIED, {"layout": "p4"}),
    ("qwen3", UNTIED, {"layout": "p4", **AGAIN}),
    ("qwen3", TIED, {"layout": "d2p2"}),
    ("qwen3", TIED, {"layout": "d2p2", **AGAIN}),
    ("qwen3", TIED, {"layout": "t2p2", **AGAIN}),
    ("qwen3", TIED, {"layout": "c2p2", **TREE}),
    ("qwen3", UNTIED, {"layout": "c2p2", **AGAIN}),
    ("qwen3", UNTIED, {"layout": "r2p2"}),
    ("qwen3", TIED, {"layout": "d2p2", "pipeline_schedule": "interleaved"}),
    ("qwen3_moe", {}, {"layout": "d2p2e2"}),
    ("qwen3_moe", {}, {"layout": "c2p2e2", **AGAIN}),
    ("qwen3_moe", {}, {"layout": "t2p2"}),
]


@pytest.fixture(scope="module")
def alone(checkpoint: Any) -> Any:
    """Return the result of one process for a model."""

    @cache
    def made(name: str, few: bool, **changes: Any) -> dict[str, Any] | None:
        return two_updates(checkpoint(name, **changes), settings_of(**FEW if few else {}), ALONE)

    return made


@pytest.mark.parametrize(("processes", "cases"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_two_updates_equal_those_of_one_process(
    checkpoint: Any, alone: Any, processes: int, cases: list[Case]
) -> None:
    """Compare losses, log-probabilities, gradient norms, gradients and weights; the optimiser's state is saved and
    restored in between. Trees are compared with rows without shared prefixes."""
    made = together(
        processes, several, [(checkpoint(name, **model), settings_of(**changes)) for name, model, changes in cases]
    )
    for (name, model, changes), found in zip(cases, made, strict=True):
        try:
            compare(found, alone(name, changes.get("batch") == FEW["batch"], **model))
        except AssertionError as error:
            error.add_note(f"{name}, {changes}")
            raise


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "d2p2"), ("qwen3_moe", "d2p2e2")])
def test_published_weights_are_whole(checkpoint: Any, tmp_path: Path, name: str, layout: str) -> None:
    together(4, published, checkpoint(name), settings_of(layout=layout), tmp_path)
    wanted, found = read_weights(checkpoint(name)), read_weights(tmp_path)
    assert found.keys() == wanted.keys()
    assert all((found[each] == weight).all() for each, weight in wanted.items())


def test_a_pipeline_of_more_stages_than_layers_is_refused(checkpoint: Any) -> None:
    settings = settings_of(layout="p2", pipeline_schedule="interleaved")
    assert "has 2 layers; p may be 1" in together(2, refused, checkpoint("qwen3"), settings)


def test_a_stage_that_is_out_of_memory_reports_it(checkpoint: Any) -> None:
    """The error must name the lack of memory, not the failure that torch's schedule makes of it."""
    together(2, full, checkpoint("qwen3"), settings_of(layout="p2"), patience_s=60, leaving=True)
