from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.parallel.layout import Layout, ModelShape, layout_of

SHAPE = ModelShape(layers=6, heads=8, kv_heads=2, intermediate=48, experts=4)
LETTERS = {"r": "replicas", "d": "data", "c": "context", "t": "tensor", "p": "pipeline"}
sizes = st.integers(1, 8)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    counts: dict[str, Any] = {name: draw(sizes) for name in LETTERS.values()}
    sharing = counts["data"] * counts["context"] * counts["tensor"]
    expert = draw(st.sampled_from([size for size in range(1, sharing + 1) if sharing % size == 0]))
    return Layout(**counts, expert=expert)


@given(layouts(), st.randoms())
def test_a_layout_is_parsed_in_any_order(layout: Layout, random: Any) -> None:
    assert Layout.parse(str(layout)) == layout
    parts = re.findall(r"[a-z]\d+", str(layout))
    parts += [f"{letter}1" for letter in "rdctpe" if letter not in str(layout)]
    random.shuffle(parts)
    assert Layout.parse("".join(parts)) == layout


@given(layouts())
def test_the_world_is_all_axes_but_the_experts(layout: Layout) -> None:
    assert layout.world == layout.replicas * layout.data * layout.context * layout.tensor * layout.pipeline
    layout.check_world(layout.world)
    assert layout.world % layout.copy == 0
    assert layout.sharing % layout.expert == 0


@given(layouts(), st.integers(1, 64))
def test_suggested_layouts_fit_their_number_of_processes(layout: Layout, processes: int) -> None:
    if processes == layout.world:
        return
    with pytest.raises(ConfigurationError, match=rf"trainer.layout: .*start {layout.world}\b") as refusal:
        layout.check_world(processes)
    suggested = re.search(r"or write (\w+)", str(refusal.value))
    assert (suggested is not None) == (processes % (layout.copy * layout.replicas) == 0)
    if suggested is not None:
        Layout.parse(suggested[1]).check_world(processes)


@given(
    layouts(),
    st.builds(ModelShape, layers=sizes, heads=sizes, kv_heads=sizes, intermediate=sizes, experts=st.integers(0, 8)),
)
def test_an_accepted_layout_divides_the_model(layout: Layout, shape: ModelShape) -> None:
    heads, kv_heads = shape.heads // layout.tensor, max(1, shape.kv_heads // layout.tensor)
    divides = (
        layout.pipeline <= shape.layers
        and all(size % layout.tensor == 0 for size in (shape.heads, shape.kv_heads, shape.intermediate))
        and heads % layout.context == 0
        and (kv_heads % layout.context == 0 or layout.context % kv_heads == 0)
        and (layout.expert == 1 or (shape.experts > 0 and shape.experts % layout.expert == 0))
    )
    if divides:
        layout.check_model(shape)
    else:
        with pytest.raises(ConfigurationError, match=r"trainer\.layout: "):
            layout.check_model(shape)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write axes with their sizes"),
        ("2d", "write axes with their sizes"),
        ("d2 t2", "write axes with their sizes"),
        ("d-2", "write axes with their sizes"),
        ("d2x2", "there is no axis x; the axes are r, d, t, p, c, e"),
        ("d2t2d1", "d is given twice"),
        ("d0", "d must be 1 or more"),
        ("d2c2e3", "the 4 ranks of d, c and t divide the experts among them; e may be 1 or 2 or 4"),
    ],
)
def test_an_invalid_layout_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t4", "t4 does not divide the model's 8 heads, 2 KV heads and an MLP 48 wide; t may be 1 or 2"),
        ("c3", "c3 cannot share 8 heads with 2 KV heads; c may be 1 or 2 or 4 or 8"),
        ("t2c8", "c8 cannot share 4 heads with 1 KV heads of each rank of t; c may be 1 or 2 or 4"),
        ("p8", "p8 needs a layer for each stage, and the model has 6 layers; p may be up to 6"),
        ("d3e3", "e3 does not divide the model's 4 experts; e may be 1"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_sizes_that_do(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Layout.parse(text).check_model(SHAPE)


def test_a_schedule_with_two_stages_per_rank_needs_two_layers_per_rank() -> None:
    Layout.parse("p3").check_model(SHAPE, stages_per_rank=2)
    said = "p4 needs a layer for each stage in 2 stages for each rank of p, and the model has 6 layers; p may be 1 or"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Layout.parse("p4").check_model(SHAPE, stages_per_rank=2)


@pytest.mark.parametrize(
    ("layout", "schedule", "said"),
    [
        (None, "1f1b", "1f1b orders the work of a pipeline, and trainer.layout has no p"),
        ("d2", "interleaved", "interleaved orders the work of a pipeline, and trainer.layout has no p"),
        ("d2p2", "zbv", "use a layout of p alone instead of d2p2"),
    ],
)
def test_a_schedule_without_a_pipeline_is_refused(layout: str | None, schedule: str, said: str) -> None:
    settings = TrainerSettings.model_validate({"backend": "archon", "layout": layout, "pipeline_schedule": schedule})
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        layout_of(settings)


def test_only_models_with_experts_divide_experts() -> None:
    with pytest.raises(ConfigurationError, match="no experts; leave e out"):
        Layout.parse("d2e2").check_model(ModelShape(layers=6, heads=8, kv_heads=2, intermediate=48, experts=0))


def test_another_number_of_processes_is_refused_with_suggestions() -> None:
    with pytest.raises(ConfigurationError, match="d2t2 is for 4 processes, and 6 joined; start 4, or write d3t2"):
        Layout.parse("t2d2").check_world(6)
