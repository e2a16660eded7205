"""Copies of a trainer state, which are written while the next step changes the state."""

from __future__ import annotations

from typing import Any

import torch

from trainer.parallel.checkpoint import copied


def state_of(value: float) -> dict[str, Any]:
    moments = {"w": {"exp_avg": torch.full((3, 2), value), "step": torch.tensor(value)}}
    return {"steps": int(value), "means": {"turn": None}, "optimizer": moments}


def test_copies_are_of_the_moment_and_use_the_memory_of_earlier_ones() -> None:
    state = state_of(1.0)
    first = copied(state)
    place = first["optimizer"]["w"]["exp_avg"].data_ptr()
    state["optimizer"]["w"]["exp_avg"].add_(1.0)
    state["optimizer"]["w"]["step"].add_(1.0)
    assert first["optimizer"]["w"]["exp_avg"].tolist() == [[1.0, 1.0]] * 3
    second = copied({**state, "steps": 2}, first)
    assert second["optimizer"]["w"]["exp_avg"].tolist() == [[2.0, 2.0]] * 3
    assert second["optimizer"]["w"]["exp_avg"].data_ptr() == place
    assert second["optimizer"]["w"]["step"].item() == 2.0
    assert (second["steps"], second["means"]) == (2, {"turn": None})


def test_tensors_of_another_shape_or_dtype_get_memory_of_their_own() -> None:
    first = copied(state_of(1.0))
    other = {"optimizer": {"w": {"exp_avg": torch.ones(2, dtype=torch.bfloat16)}, "v": {"exp_avg": torch.ones(1)}}}
    second = copied(other, first)
    assert second["optimizer"]["w"]["exp_avg"].dtype == torch.bfloat16
    assert second["optimizer"]["v"]["exp_avg"].tolist() == [1.0]
    assert copied({"optimizer": torch.ones(1)}, first)["optimizer"].tolist() == [1.0]
