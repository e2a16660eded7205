"""The states of sessions, claims, runs and jobs, as stored, sent and shown."""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """Whether a session takes further calls."""

    OPEN = "open"
    ENDED = "ended"


class TrainingState(StrEnum):
    """How far a session has come on its way to the trainer.

    `pending`: it is open, or ended and not yet rewarded. `ready`: rewarded and claimable. `leased`: a claim holds it.
    `consumed`: a committed step used it. `stale`: its tokens were too old when a trainer claimed. `expired`: no
    reward came in time. `excluded`: it is not trained, for example because it is an evaluation.
    """

    PENDING = "pending"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    STALE = "stale"
    EXPIRED = "expired"
    EXCLUDED = "excluded"


class Outcome(StrEnum):
    """The result of the attempt. `failed` and `cancelled` are not trained unless rewarded."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EndReason(StrEnum):
    """What ended a session: a final reward, a request, the lack of calls, or its erasure."""

    REWARD = "reward"
    EXPLICIT = "explicit"
    IDLE = "idle"
    ERASED = "erased"


class ClaimState(StrEnum):
    """The life of a claim. A lease ends in a commit, is given back, or expires."""

    LEASED = "leased"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class RunState(StrEnum):
    """Whether a run is served and trained. A `paused` run is served and not trained; an `archived` one keeps its data
    and is neither served nor trained. A `deleted` one exists for nobody: its rows and weights are being removed."""

    ACTIVE = "active"
    PAUSED = "paused"
    ARCHIVED = "archived"
    DELETED = "deleted"


class JobState(StrEnum):
    """How far background work has come.

    `waiting`: not tried yet. `running`: leased to a worker. `failed`: an attempt failed and another one follows.
    `done`: completed. `dead`: no attempt follows unless an operator retries it. `cancelled`: by an operator.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"
