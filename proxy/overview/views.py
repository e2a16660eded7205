"""The views that the operating API, the admin page and the CLI show: frozen, JSON by field name.

Times are seconds since the epoch, UTC. None means unknown or missing, never zero. Later releases may add fields, but
never rename or remove one.
"""

from __future__ import annotations

from typing import Any

import msgspec

# The number of latest rewarded sessions over which a run's mean reward is taken.
REWARD_WINDOW = 128


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run at a glance.

    `sessions` counts sessions by training state (every state is present); `open_sessions` have not ended.
    `mean_reward` is over the last `reward_count` (at most 128) ended and rewarded training sessions. Staleness, in
    versions, is that of the tokens trained in the newest step.

    Three shares are over the turns of the last 200 sessions. `inexact_share`: of the turns with an earlier turn to
    build on, those that did not reuse it token for token. `unattributed_share`: turns whose call named no session and
    extended no conversation, so that it opened a session of its own. `cut_share`: answers that reached the token
    limit or whose client disconnected.

    `sessions`, `session_count`, `turn_count`, `swaps` and `last_activity_at` are from the same moment, which may be a
    minute ago in a store of more than 20,000 sessions. `tokens_per_second` is over the last minute, or over the known
    part of it (`overview/live.py`).

    `begun_from` is the version of another run whose weights are version 0, such as `shop@12`; None for a run that
    began from its base model. `late_rewards` counts entries that arrived after a trainer had claimed the session,
    `revised_sessions` the trained sessions whose rewards changed after the training. `not_learnt_because` lists
    sentences that explain why the run cannot have learnt anything yet (`overview/learning.py`); it is empty if the
    run may have learnt something.
    """

    id: str
    name: str
    state: str
    base_model: str
    created_at: float
    head_version: int
    serving_version: int
    sessions: dict[str, int]
    session_count: int
    open_sessions: int
    turn_count: int
    swaps: int
    mean_reward: float | None
    reward_count: int
    staleness_mean: float | None
    staleness_max: int | None
    tokens_per_second: float
    late_rewards: int
    revised_sessions: int
    inexact_share: float | None
    unattributed_share: float | None
    cut_share: float | None
    last_activity_at: float | None
    begun_from: str | None = None
    not_learnt_because: tuple[str, ...] = ()
    project: str = "default"
    """The name of the project that the run belongs to."""


class RewardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of consecutive rewarded sessions.

    `sessions` is the number of sessions up to its end, `mean` the bucket's own mean, `moving_mean` the mean of the
    window of sessions that ends with the bucket.
    """

    sessions: int
    at: float
    mean: float
    moving_mean: float


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A version on the curves. `swap_seconds` is how long generation paused for the swap to it."""

    version: int
    at: float
    served_at: float | None
    staleness_mean: float | None
    staleness_max: int | None
    swap_seconds: float | None
    reward_mean: float | None


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens per second in the bucket that ends at `at`."""

    at: float
    tokens_per_second: float


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of a run, oldest point first, each of at most some hundred points. `reward` may be a minute old in a
    store of more than 20,000 sessions."""

    window: int
    reward: tuple[RewardPoint, ...]
    steps: tuple[StepPoint, ...]
    rate: tuple[RatePoint, ...]


class EventItem(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the event log."""

    id: int
    kind: str
    data: dict[str, Any]
    created_at: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the event stream: the current run, and the events since the previous snapshot."""

    run: RunSummary
    events: tuple[EventItem, ...]
    last_event_id: int


class RunHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The health of one run.

    `trainer` is `active` (claimed, renewed or committed within the run's lease time), `away` (trajectories have been
    ready for longer than that), `idle` (quiet, and no trajectory has been ready for long) or `never` (no claim yet).
    `paused_because` is the reason given for a current pause. `rejected_version` is the newest version, if it was
    rejected, and `rejected_because` the reason; `taken_back_version` is one that was rolled back automatically and is
    newer than the head. `mismatch` is the difference between engine and trainer, in nats per
    token, that the newest step reported as a warning; None without a warning. `drifted_judges` maps judges whose
    newest scores differ from those before to how they do.
    """

    id: str
    name: str
    state: str
    head_version: int
    serving_version: int
    trainer: str
    trainer_seen_at: float | None
    paused_because: str | None = None
    rejected_version: int | None = None
    taken_back_version: int | None = None
    taken_back_because: str | None = None
    rejected_because: str | None = None
    mismatch: float | None = None
    drifted_judges: dict[str, str] = {}


class EngineLeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy that changes what an engine holds, and when its lease ends unless it is renewed."""

    owner: str
    until: float


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that the proxies of this store share.

    `state` is one of

    - `starting`: it has not answered yet;
    - `ready`;
    - `behind`: it serves an older version of a run while it loads the newest;
    - `not_ready`: it answers, and serves no version of a run placed on it, for the reason in `problem`;
    - `down`: it answered before and does not now;
    - `unused`: no run is placed on it;
    - `draining`: it takes no new calls, and some have not ended;
    - `drained`: it takes no new calls, and all have ended.

    `run` is the name of the one run that it is dedicated to. `origin` is `configured`, `local` (started by `base-rl
    up`) or `api`; `desired` is `serving`, `draining` or `drained`. `versions` are what it serves, by the names of its
    runs; None where it serves none yet. `adapters` are the LoRA adapters in its memory. `calls` is the number of
    calls under way of all `proxies` that use it, `outstanding_tokens` their prompts and allowed new tokens; the
    figures of other proxies are some seconds old. `capacity` is the number of generations that one proxy has there at
    once; further calls wait. `seen_at` is when it last answered a proxy.
    """

    name: str
    url: str
    base_model: str
    state: str
    problem: str | None
    versions: dict[str, int | None]
    outstanding_tokens: int
    id: str = ""
    kind: str = "sglang"
    run: str | None = None
    origin: str = "configured"
    desired: str = "serving"
    adapters: tuple[str, ...] = ()
    calls: int = 0
    capacity: int = 0
    proxies: int = 1
    lease: EngineLeaseView | None = None
    created_at: float = 0.0
    seen_at: float | None = None


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """All engines, oldest first."""

    engines: tuple[EngineView, ...]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the proxy. `ready`: model calls are served. `status` is `ok`, or `degraded` with `problems`.

    `database` is `ok`, `unwritable` (reads work, writes do not), `down` or `damaged`. `database_integrity` is the
    state of a SQLite file: `checking`, `ok`, `damaged`, or `unchecked` if the check failed; None on PostgreSQL.
    `engine_ready` is None if no engine is watched.
    """

    ready: bool
    status: str
    problems: tuple[str, ...]
    database: str
    database_seconds: float
    database_integrity: str | None
    engine_ready: bool | None
    disk_free_bytes: int | None
    disk_total_bytes: int | None
    runs: tuple[RunHealth, ...]
    now: float
    engines: tuple[EngineView, ...] = ()


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, oldest first."""

    runs: tuple[RunSummary, ...]
