"""Answers to one prompt as a group: their own rewards are compared with each other. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from proxy.contract.choices import Prompt, prompts_alike
from proxy.contract.trajectory import TrajectoryTurn
from trainer.algorithm.rounding import deviations


def siblings(turns: Sequence[TrajectoryTurn]) -> list[int]:
    """Return for each turn the index of the first turn with the same prompt, which may be its own."""
    return prompts_alike(
        [
            Prompt(turn.parent, turn.prefix_tokens, turn.prefix_tokens + len(turn.prompt_ids), turn.packed_prompt_ids)
            for turn in turns
        ]
    )


def rewarded_siblings(turns: Sequence[TrajectoryTurn], rewards: Mapping[int, float]) -> dict[int, int]:
    """Return for each rewarded turn with a rewarded sibling the first turn with the same prompt.

    `rewards` are rewards of turns by index. A turn without a rewarded sibling is omitted: there is nothing to compare
    it with.
    """
    prompts = siblings(turns)
    counts = Counter(prompts[place] for place in rewards)
    return {place: prompts[place] for place in rewards if counts[prompts[place]] > 1}


def against_siblings(turns: Sequence[TrajectoryTurn], rewards: Mapping[int, float]) -> dict[int, float]:
    """Return each reward minus the mean reward of all answers to its prompt, by index of the turn.

    `rewards` are rewards of turns by index; those without rewarded siblings are omitted (`rewarded_siblings`).
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for place, first in rewarded_siblings(turns, rewards).items():
        groups[first].append(place)
    found: dict[int, float] = {}
    for places in groups.values():
        found |= zip(places, deviations([rewards[place] for place in places]), strict=True)
    return found
