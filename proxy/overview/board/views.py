"""The view of a run among all runs."""

from __future__ import annotations

import msgspec


class RunGlance(msgspec.Struct, frozen=True, kw_only=True):
    """A run among all runs.

    `rewards` are means of consecutive groups of the last rewarded training sessions, oldest first: at most
    `MAX_POINTS` of them. `mean_reward` is over all of these sessions; None without one. `waiting` counts the
    trajectories that no trainer has claimed yet. Staleness, in versions, is that of the tokens trained in the newest
    step.
    """

    id: str
    name: str
    state: str
    base_model: str
    created_at: float
    head_version: int
    serving_version: int
    session_count: int
    waiting: int
    rewards: tuple[float, ...]
    mean_reward: float | None
    staleness_mean: float | None
    last_activity_at: float | None
    project_id: str
    project: str
