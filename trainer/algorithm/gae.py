"""Generalised advantage estimation over the output tokens of a trajectory's paths (Schulman et al. 2016): pure.

An output token is a step of the agent; text that it reads between turns belongs to the environment and is no step.
Along a path

    δ = r + γ·V(next) − V        A = δ + γλ·A(next)

The token after a turn's last one is the first token of the turn that continues it, multiplied by the turn discount.
If several turns continue one turn, V(next) and A(next) are means over the leaves below them, so that branching does
not count twice: A is then the mean, over those leaves, of its value on the path to each. A turn without a trained
token is no step; its reward comes with the last token before it.

Axes: N trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.config import Scale

_FLOOR = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTree:
    """A trajectory's rewards. `parents[t]` is the earlier turn that turn t continues, or None; `rewards[t]` comes
    with the last token of turn t.

    Turns in `apart` are superseded: the critic cannot estimate what would have followed them, so it is neither used
    nor trained on them. All their tokens have the advantage `rewards[t]`, which already is a difference to the other
    answers. No turn continues them, and they have no parent.
    """

    parents: tuple[int | None, ...]
    rewards: tuple[float, ...]
    apart: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Discounts:
    """γ and λ per token, and the factor from a turn to the one that continues it."""

    discount: float
    gae_lambda: float
    turn_discount: float


def tree_advantages(
    tree: RewardTree, values: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], discounts: Discounts
) -> list[list[float]]:
    """Return the advantage of each token. `values[t]` has the critic's value before each token of turn t, in order;
    `costs[t]` is subtracted from the tokens' rewards."""
    turns = len(tree.parents)
    leaves = [0] * turns
    value_below = [0.0] * turns
    advantage_below = [0.0] * turns
    found: list[list[float]] = [[] for _ in range(turns)]
    decay = discounts.discount * discounts.gae_lambda
    for turn in reversed(range(turns)):
        if turn in tree.apart:
            found[turn] = _apart(tree.rewards[turn], costs[turn])
            continue
        count = max(1, leaves[turn])
        value_next, advantage_next = value_below[turn] / count, advantage_below[turn] / count
        reward = tree.rewards[turn]
        for value, cost in zip(reversed(values[turn]), reversed(costs[turn]), strict=True):
            advantage_next = reward - cost + discounts.discount * value_next - value + decay * advantage_next
            found[turn].append(advantage_next)
            value_next, reward = value, 0.0
        found[turn].reverse()
        parent = tree.parents[turn]
        if parent is not None:
            weight = count * discounts.turn_discount
            leaves[parent] += count
            value_below[parent] += weight * (reward + value_next)
            advantage_below[parent] += weight * advantage_next
    return found


def _apart(advantage: float, costs: Sequence[float]) -> list[float]:
    """Return the advantages of a superseded turn's tokens: each token pays its own cost and those after it."""
    to_come = list(accumulate(reversed(costs)))[::-1]
    return [advantage - cost for cost in to_come]


def set_apart(trajectory_N: Tensor, turn_N: Tensor, trees: Mapping[int, RewardTree]) -> Tensor:
    """Return a mask of the tokens of superseded turns (`RewardTree.apart`)."""
    apart_N = torch.zeros_like(trajectory_N, dtype=torch.bool)
    for trajectory, tree in trees.items():
        for turn in tree.apart:
            apart_N |= (trajectory_N == trajectory) & (turn_N == turn)
    return apart_N


def batch_advantages(
    trajectory_N: Tensor,
    turn_N: Tensor,
    values_N: Tensor,
    costs_N: Tensor,
    trees: Mapping[int, RewardTree],
    discounts: Discounts,
) -> Tensor:
    """Return the advantages of a batch's tokens, float64. The tokens of a turn must be together and in order; turns
    may be in any order."""
    places: dict[int, dict[int, slice]] = {trajectory: {} for trajectory in trees}
    for start, end in _runs(trajectory_N, turn_N):
        places[int(trajectory_N[start])][int(turn_N[start])] = slice(start, end)
    values, costs = values_N.double().tolist(), costs_N.double().tolist()
    advantages = [0.0] * len(values)
    nothing = slice(0, 0)
    for trajectory, tree in trees.items():
        slices = [places[trajectory].get(turn, nothing) for turn in range(len(tree.parents))]
        found = tree_advantages(tree, [values[each] for each in slices], [costs[each] for each in slices], discounts)
        for each, of_turn in zip(slices, found, strict=True):
            advantages[each] = of_turn
    return torch.tensor(advantages, dtype=torch.float64)


def _runs(trajectory_N: Tensor, turn_N: Tensor) -> list[tuple[int, int]]:
    """Return [start, end) of each turn's tokens."""
    if not turn_N.numel():
        return []
    changes_N = (trajectory_N.diff() != 0) | (turn_N.diff() != 0)
    starts = [0, *(changes_N.nonzero()[:, 0] + 1).tolist()]
    return list(zip(starts, [*starts[1:], turn_N.numel()], strict=True))


def scaled(advantages_N: Tensor, kind: Scale) -> Tensor:
    """Divide the advantages by their root mean square plus a floor of 1e-4; with `none` return them unchanged.

    Deviations are taken from zero and not from the mean: the mean is what the critic did not foresee, and without it
    a batch of successes would teach that half of them were failures. Tokens to which a grammar left no alternative
    have the advantage 0 and do not count.
    """
    chosen_M = advantages_N[advantages_N != 0]
    if kind is Scale.NONE or not chosen_M.numel():
        return advantages_N
    return advantages_N / (chosen_M.square().mean().sqrt() + _FLOOR)
