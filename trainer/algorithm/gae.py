"""Generalised advantage estimation over the output tokens of a trajectory's paths (Schulman et al. 2016): pure.

A token is a step of the agent; what it reads between its turns is the environment's, and no step. Along a path

    δ = r + γ·V(next) − V        A = δ + γλ·A(next)

where the next token of a turn's last one is the first of the turn that goes on from it, less by the turn discount.
Where several turns go on from one, V(next) and A(next) are their means over the leaves below them, so that branching
does not count twice: A is then the mean, over those leaves, of its value on the path to each. A turn without a token
to learn is no step; its reward comes with the last token before it.

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
    """A trajectory's rewards. `parents[t]` is the turn that turn t goes on from, before it in order (None: none);
    `rewards[t]` comes with its last token.

    Turns in `apart` are superseded: the critic cannot say what would have come after them, so it has no part in
    them. All their tokens have the advantage `rewards[t]`, a difference to the other answers already, and the critic
    is to learn nothing from them. Nothing goes on from them, and they go on from nothing.
    """

    parents: tuple[int | None, ...]
    rewards: tuple[float, ...]
    apart: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Discounts:
    """γ and λ per token, and what a turn is discounted by for one that goes on from it."""

    discount: float
    gae_lambda: float
    turn_discount: float


def tree_advantages(
    tree: RewardTree, values: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], discounts: Discounts
) -> list[list[float]]:
    """Return the advantage of each token. `values[t]` are those of the tokens of turn t, in order, before each was
    chosen; `costs[t]` are taken from their rewards."""
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
    """Return the advantages of a superseded turn's tokens: each costs what it and those after it in its turn do."""
    to_come = list(accumulate(reversed(costs)))[::-1]
    return [advantage - cost for cost in to_come]


def set_apart(trajectory_N: Tensor, turn_N: Tensor, trees: Mapping[int, RewardTree]) -> Tensor:
    """Return which tokens are of superseded turns (`RewardTree.apart`)."""
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
    """Return the advantages of a batch's tokens, float64. The tokens of a turn stand together and in order; the turns
    may stand in any."""
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
    """Divide the advantages by their root mean square plus a floor of 1e-4; return them as they are for `none`.

    The spread is taken around zero and not around the mean: the critic has not foreseen the mean, and without it a
    batch of successes would teach that half of them were failures. Tokens that nobody chose, whose advantage is 0,
    do not count.
    """
    chosen_M = advantages_N[advantages_N != 0]
    if kind is Scale.NONE or not chosen_M.numel():
        return advantages_N
    return advantages_N / (chosen_M.square().mean().sqrt() + _FLOOR)
