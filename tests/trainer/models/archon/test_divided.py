"""Models divided among four processes on gloo make the same steps as one process (`make test-ranks`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.archon.divided import beside, divided, published, refused, refused_by_a_disk
from tests.trainer.models.archon.steps import ALGORITHM, compare, settings_of, two_updates
from tests.trainer.models.archon.together import together
from tests.trainer.tiny import ALONE
from trainer.models.state_dict import read_weights

pytestmark = [pytest.mark.archon, pytest.mark.timeout(900)]

DENSE = ["d4", "c4", "r4", "d2t2", "d2c2", "t2c2", "r2d2", "r2t2", "r2c2"]
"""Layouts of a dense model; c4 has more ranks than the model has KV heads."""
SPARSE = ["d4", "d4e4", "c4e4", "d2t2", "d4e2", "d2c2e2", "d2t2e2", "t2c2e4", "r2d2e2", "r2t2e2", "r2c2"]


# Layouts whose axes are all in others, of this model or the other. The short form of the suite leaves them out.
CONTAINED = {
    "qwen3": {"d4", "r4", "r2t2", "r2d2", "r2c2"},
    "qwen3_moe": {"d4", "d4e4", "c4e4", "d2t2", "d4e2", "d2c2e2"},
}


def case(name: str, layout: str) -> Any:
    exhaustive = layout in CONTAINED.get(name, ())
    return pytest.param(name, layout, marks=[pytest.mark.exhaustive] if exhaustive else [])


@pytest.fixture(scope="module")
def alone(checkpoint: Any) -> Any:
    """Return the result of one process for a model."""

    @cache
    def made(name: str, **changes: Any) -> dict[str, Any] | None:
        return two_updates(checkpoint(name, **changes), settings_of(), ALONE)

    return made


@pytest.mark.parametrize(
    ("name", "layout"),
    [case("qwen3", layout) for layout in DENSE]
    + [case("qwen3_moe", layout) for layout in SPARSE]
    + [("qwen2", "d2t2"), ("qwen2", "t2c2"), ("qwen3_biased", "t2c2"), ("qwen3_moe_odds", "d2t2e4")],
)
def test_two_updates_equal_those_of_one_process(checkpoint: Any, alone: Any, name: str, layout: str) -> None:
    """Compare losses, log-probabilities, gradient norms, gradients and weights; the optimiser's state is saved and
    restored in between."""
    compare(together(4, divided, checkpoint(name), settings_of(layout=layout)), alone(name))


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("qwen3", "d2t2", {"intermediate_size": 50}),
        ("qwen3_moe", "d4e2", {"num_experts": 6}),
        ("qwen3", "t4", {"num_key_value_heads": 4}),
        ("qwen3", "t2c2", {"num_key_value_heads": 2, "num_attention_heads": 8}),
    ],
)
def test_uneven_parts_give_the_same_updates(
    checkpoint: Any, alone: Any, name: str, layout: str, changes: dict[str, int]
) -> None:
    """A width of 25, or 3 experts, over two ranks; other numbers of heads."""
    compare(together(4, divided, checkpoint(name, **changes), settings_of(layout=layout)), alone(name, **changes))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3", "t2c2"),
        pytest.param("qwen3_moe", "d2c2e4", marks=pytest.mark.exhaustive),
        ("qwen3_moe", "t2c2e2"),
    ],
)
def test_recomputed_activations_give_the_same_updates(checkpoint: Any, alone: Any, name: str, layout: str) -> None:
    settings = settings_of(layout=layout, activation_checkpointing=True)
    compare(together(4, divided, checkpoint(name), settings), alone(name))


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "t2c2"), ("qwen3_moe", "d2c2e2")])
def test_divided_trees_give_the_same_updates(checkpoint: Any, alone: Any, name: str, layout: str) -> None:
    """Compare with rows without shared prefixes."""
    batch = {"packing": "tree", "max_tokens_per_microbatch": 31}
    compare(together(4, divided, checkpoint(name), settings_of(layout=layout, batch=batch)), alone(name))


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "t2c2"), ("qwen3_moe", "d2c2e2")])
def test_divided_bfloat16_is_as_accurate_as_whole(checkpoint: Any, alone: Any, name: str, layout: str) -> None:
    """Compare the first update, before coarse rounding leads to different steps."""
    found = together(4, divided, checkpoint(name), settings_of(layout=layout, precision="bfloat16"))
    exact = alone(name)
    assert 1e-5 < (found["logprobs"][0] - exact["logprobs"][0]).abs().max() < 0.1
    assert found["norms"][0] == pytest.approx(exact["norms"][0], rel=0.05)


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "d2t2"), ("qwen3_moe", "t2c2e4")])
def test_published_weights_are_whole(checkpoint: Any, tmp_path: Path, name: str, layout: str) -> None:
    """A divided model publishes the loaded weights bit for bit, under the names of the original files."""
    together(4, published, checkpoint(name), settings_of(layout=layout), tmp_path)
    wanted, found = read_weights(checkpoint(name)), read_weights(tmp_path)
    assert found.keys() == wanted.keys()
    assert all((found[each] == weight).all() for each, weight in wanted.items())


def test_a_disk_that_refuses_a_divided_version_lets_no_rank_wait(checkpoint: Any, tmp_path: Path) -> None:
    assert "model-00002-of" in together(
        4, refused_by_a_disk, checkpoint("qwen3"), settings_of(layout="d2t2"), tmp_path
    )


def test_a_model_of_the_other_backend_learns_from_each_row_once(checkpoint: Any, alone: Any) -> None:
    """Critics do this: ranks with the same rows have the same gradient of it, which must count once."""
    found = together(4, beside, checkpoint("qwen3"), settings_of(backend="fsdp"), "d2c2")
    compare(found, alone("qwen3"))


def test_every_rank_refuses_a_layout_that_does_not_fit(checkpoint: Any) -> None:
    said = together(4, refused, checkpoint("qwen3"), settings_of(layout="t4"))
    assert "t may be 1 or 2" in said
    assert "for 2 processes, and 4 joined" in together(4, refused, checkpoint("qwen3"), settings_of(layout="d2"))
    assert "no experts" in together(4, refused, checkpoint("qwen3"), settings_of(layout="d4e2"))


@pytest.mark.parametrize("layout", ["d2t2", "p2"])
def test_a_reference_that_follows_is_divided_as_the_policy_is(checkpoint: Any, layout: str) -> None:
    directory, moving = checkpoint("qwen3"), {"reference": {"reset_every": 3}}
    wanted = two_updates(directory, settings_of(**moving), ALONE)
    assert wanted is not None
    size = 4 if layout == "d2t2" else 2
    compare(together(size, divided, directory, settings_of(layout=layout, **moving)), wanted)


@pytest.mark.parametrize("layout", ["t2c2e4", "p2"])
def test_routers_are_balanced_as_in_one_process(checkpoint: Any, layout: str) -> None:
    directory = checkpoint("qwen3_moe")
    balanced = {"algorithm": {**ALGORITHM, "router_aux_coefficient": 0.5}}
    wanted = two_updates(directory, settings_of(**balanced), ALONE)
    assert wanted is not None
    size = 2 if layout == "p2" else 4
    compare(together(size, divided, directory, settings_of(layout=layout, **balanced)), wanted)
