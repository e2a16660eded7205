"""Discounted later rewards of turns, and their positions, along the token tree.

`parents[t]` is the turn that turn t continues, or None; parents come before their children.
"""

from __future__ import annotations

from collections.abc import Sequence


def positions(parents: Sequence[int | None]) -> list[int]:
    """Return for each turn the number of turns before it on its path."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent is None else found[parent] + 1)
    return found


def what_follows(
    rewards: Sequence[float | None], parents: Sequence[int | None], turn_discount: float
) -> list[float | None]:
    """Return for each turn γ·G(next), without its own reward; None if no later turn has a reward.

    If several turns continue one turn, G(next) is the mean over the leaves below them, so that branching does not
    count twice.
    """
    leaves = [0] * len(parents)
    below = [0.0] * len(parents)
    rewarded = [False] * len(parents)
    found: list[float | None] = [None] * len(parents)
    for turn in reversed(range(len(parents))):
        count = max(1, leaves[turn])
        later = below[turn] / count
        if rewarded[turn]:
            found[turn] = later
        parent = parents[turn]
        if parent is not None:
            leaves[parent] += count
            below[parent] += turn_discount * count * ((rewards[turn] or 0.0) + later)
            rewarded[parent] |= rewarded[turn] or rewards[turn] is not None
    return found
