"""Answers to one prompt as a group: their own rewards are compared with each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from proxy.contract.choices import Prompt, prompts_alike
from proxy.contract.trajectory import TrajectoryTurn


def siblings(turns: Sequence[TrajectoryTurn]) -> list[int]:
    """Return for each turn the place of the first turn with the same prompt: its own if there is none before it."""
    return prompts_alike(
        [
            Prompt(turn.parent, turn.prefix_tokens, turn.prefix_tokens + len(turn.prompt_ids), turn.packed_prompt_ids)
            for turn in turns
        ]
    )


def against_siblings(turns: Sequence[TrajectoryTurn], rewards: Mapping[int, float]) -> dict[int, float]:
    """Return each reward less the mean of the rewards of all answers to its prompt, by the place of its turn.

    `rewards` are those of turns, by place. One that no other answer to its prompt has beside it is left out: there is
    nothing to compare it with.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place, first in enumerate(siblings(turns)):
        if place in rewards:
            groups[first].append(place)
    found: dict[int, float] = {}
    for places in groups.values():
        if len(places) == 1:
            continue
        # Distances to the lowest are summed, so that equal rewards differ from their mean by exactly zero.
        lowest = min(rewards[place] for place in places)
        mean = lowest + sum(rewards[place] - lowest for place in places) / len(places)
        found |= {place: rewards[place] - mean for place in places}
    return found
