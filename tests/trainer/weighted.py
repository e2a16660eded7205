"""A loss in which every token has its own weight, so that no two tokens can be confused."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer.batching.packing import MicroBatch
from trainer.models.huggingface import PolicyModel

Place = tuple[int, int, int]
"""A trained token: trajectory, turn, position in its output."""


def weight(trajectory: int, turn: int, position: int) -> float:
    return 1 + trajectory - 0.3 * turn + 0.1 * position


def learn(model: PolicyModel, micro_batches: Iterable[MicroBatch]) -> dict[Place, float]:
    """Add the gradient of the weighted sum of log-probabilities. Return the log-probabilities by place, on the
    model's device."""
    device = next(model.parameters()).device
    values: dict[Place, float] = {}
    for on_cpu in micro_batches:
        each = on_cpu.to(device)
        found_N, _ = model(
            each.input_ids_BT,
            each.position_ids_BT,
            each.predictor_N,
            each.targets_N,
            each.temperature_N,
            each.reach_BT,
        )
        places: list[Place] = []
        for member, number in zip(on_cpu.trajectory_N.tolist(), on_cpu.turn_N.tolist(), strict=True):
            same = bool(places) and places[-1][:2] == (member, number)
            places.append((member, number, places[-1][2] + 1 if same else 0))
        values.update(zip(places, found_N.tolist(), strict=True))
        weights_N = torch.tensor([weight(*place) for place in places], dtype=found_N.dtype, device=device)
        torch.autograd.backward((weights_N * found_N).sum())
    return values
