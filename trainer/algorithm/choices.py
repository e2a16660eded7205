"""Answers to one prompt as a group: their own rewards are compared with each other. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from proxy.contract.choices import Prompt, prompts_alike
from proxy.contract.trajectory import TrajectoryTurn
from trainer.algorithm.rounding import deviations


def siblings(turns: Sequence[TrajectoryTurn]) -> list[int]:
    """Return for each turn the place of the first turn with the same prompt: its own if there is none before it."""
    return prompts_alike(
        [
            Prompt(turn.parent, turn.prefix_tokens, turn.prefix_tokens + len(turn.prompt_ids), turn.packed_prompt_ids)
            for turn in turns
        ]
    )


def rewarded_siblings(turns: Sequence[TrajectoryTurn], rewards: Mapping[int, float]) -> dict[int, int]:
    """Return for each reward that has another answer's to its prompt beside it the first turn with that prompt.

    `rewards` are those of turns, by place. A reward without another beside it is left out: there is nothing to
    compare it with.
    """
    prompts = siblings(turns)
    counts = Counter(prompts[place] for place in rewards)
    return {place: prompts[place] for place in rewards if counts[prompts[place]] > 1}


def against_siblings(turns: Sequence[TrajectoryTurn], rewards: Mapping[int, float]) -> dict[int, float]:
    """Return each reward less the mean of the rewards of all answers to its prompt, by the place of its turn.

    `rewards` are those of turns, by place; those without siblings are left out (`rewarded_siblings`).
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place, first in rewarded_siblings(turns, rewards).items():
        groups[first].append(place)
    found: dict[int, float] = {}
    for places in groups.values():
        found |= zip(places, deviations([rewards[place] for place in places]), strict=True)
    return found
