"""With which version a fall of the reward began. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.gates.findings import Arm
from proxy.settings import ReleaseSettings


def first_fallen(release: ReleaseSettings, newest_first: Sequence[Arm], proven: int) -> int:
    """Return the index of the oldest version that fell together with those that are proven to be worse.

    `newest_first` has the sessions of each version, and those up to the index `proven` are surely worse than the ones
    before them. A reward that falls a little with each version is proven at the last of them first; going back by one
    version would leave the run with the rest of the fall.

    The estimate is that of Page's CUSUM: the start at which the sum of (level - reward) over all later sessions is
    largest, with a level that is half of `rollback.max_drop` below the highest mean that the versions before any of
    the starts had.
    """
    wanted = release.rollback
    assert wanted.max_drop is not None, "the watch is on"
    last = max(proven, min(wanted.window, len(newest_first) - 1) - 1)
    before = [_mean(release, newest_first[start + 1 : start + 1 + wanted.predecessors]) for start in range(last + 1)]
    level = max((mean for mean in before[proven:] if mean is not None), default=0.0) - wanted.max_drop / 2
    total, highest, found = 0.0, 0.0, proven
    for start in range(last + 1):
        total += sum(level - reward for reward in _clipped(release, newest_first[start]))
        if start == proven or (start > proven and total > highest):
            highest, found = total, start
    return found


def _mean(release: ReleaseSettings, arms: Sequence[Arm]) -> float | None:
    rewards = [reward for arm in arms for reward in _clipped(release, arm)]
    return sum(rewards) / len(rewards) if rewards else None


def _clipped(release: ReleaseSettings, arm: Arm) -> list[float]:
    return [min(release.reward_high, max(release.reward_low, reward)) for reward in arm.rewards]
