"""The comparison of two versions, as the API answers it."""

from __future__ import annotations

import msgspec

from proxy.overview.steps.views import StepItem


class VersionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the sessions that one version alone answered; means and shares are None without any.

    `reward_mean` is over the `rewarded` ones. `failed_share` is the share of sessions that ended as failed,
    `cut_share` the share of calls whose answer reached its bound on tokens, `call_seconds` the mean duration of a
    call.
    """

    version: int
    sessions: int = 0
    rewarded: int = 0
    reward_mean: float | None = None
    failed_share: float | None = None
    calls_per_session: float | None = None
    cut_share: float | None = None
    call_seconds: float | None = None


class Mover(msgspec.Struct, frozen=True, kw_only=True):
    """A session that moved the policy between the two versions, in the step that made `version`.

    `pull` is its advantage times its trained tokens: positive if its answers became likelier. `share` is the part of
    the absolute pull of all sessions between the versions. `name` is the client's own name for the session.
    """

    session_id: str
    version: int
    reward: float
    advantage: float
    trained_tokens: int
    pull: float
    share: float
    task: str | None = None
    name: str | None = None


class TaskChange(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of a task's sessions under the older and the newer version, with the number of sessions."""

    task: str
    before: float
    after: float
    sessions_before: int
    sessions_after: int


class VersionDiff(msgspec.Struct, frozen=True, kw_only=True):
    """What changed from one version to a later one that was made from it.

    `steps` lead from the one to the other, oldest first. `movers` have the largest pull, `better` and `worse` are the
    tasks whose mean reward rose or fell most; each list is bounded.
    """

    run: str
    before: VersionFigures
    after: VersionFigures
    steps: tuple[StepItem, ...]
    trained_sessions: int
    movers: tuple[Mover, ...]
    better: tuple[TaskChange, ...]
    worse: tuple[TaskChange, ...]
