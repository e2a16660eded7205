"""The views that the operating API, the admin page and the CLI read: frozen, JSON by field name.

Times are seconds since the epoch, UTC. None means unknown or not there, never zero. Fields are added over time,
never renamed or removed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.policy import WeightsReference
from proxy.contract.turn import VersionSpan
from proxy.overview.rewards.views import PreferenceView, RewardItem

REWARD_WINDOW = 128
"""Over how many of the last rewarded sessions a run's mean reward is taken."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run at a glance.

    `sessions` counts them by training state (every state is present); `open_sessions` are those not ended.
    `mean_reward` is over the last `reward_count` (128 at most) ended and rewarded training sessions. Staleness, in
    versions, is that of the tokens trained in the newest step. `inexact_share` is the share of turns, among those of
    the last 200 sessions that had an earlier turn to build on, whose past was not reused token for token.
    `unattributed_share` is the share of turns, among all of these sessions, whose calls named no session and extended
    no conversation: each opened a session of its own. `cut_share` is the share of their answers that did not end by
    themselves: they reached their bound on tokens, or the client left.
    `sessions`, `session_count`, `turn_count`, `swaps` and `last_activity_at` are of one moment, which in a store of
    more than 20,000 sessions may be a minute ago. `tokens_per_second` is over the last minute, or the end of it that
    is known (`overview/live.py`).
    `late_rewards` counts entries that came when a trainer had their session already, `revised_sessions` the trained
    sessions whose rewards are others now than those they were trained on. `not_learnt_because` says in sentences why
    the run cannot have learnt anything yet (`overview/learning.py`); empty where it may have.
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
    not_learnt_because: tuple[str, ...] = ()


class SessionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A session in a list. `reward` is the combined one as of now; `group` the group's name. `explanation` says in a
    sentence why it is or is not trained. An erased session has lost its content: the client's name, the task, the
    texts."""

    id: str
    run_id: str
    external_id: str | None
    attempt: int | None
    task: str | None
    group_id: str | None
    group: str | None
    purpose: str
    state: str
    training: str
    explanation: str
    outcome: str | None
    end_reason: str | None
    attributed_by: str
    turn_count: int
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    consumed_by: int | None
    revised_at: float | None
    created_at: float
    last_active_at: float
    ended_at: float | None
    erased_at: float | None = None
    erased_reason: str | None = None


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids and log-probabilities; `output_texts`, one text per output id, where the proxy can decode them."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_texts: tuple[str, ...] | None


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A model call with its text. `messages` are those that the call added; `answer` is the message that was sent
    back, None where the call failed before there was one. `prefix_tokens` of the `prompt_tokens` were shared with
    the parent. `attributed_by` is how the call came to its session. `tokens` only where asked for. `masked` are
    [start, end) over the turn's own prompt ids followed by its output ids: redacted. `failure` is why a failed call
    failed, and of which engine, where that is known."""

    id: str
    session_id: str
    run_id: str
    ordinal: int
    parent_id: str | None
    state: str
    attributed_by: str
    continuation: str
    finish_reason: str
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    spans: tuple[VersionSpan, ...]
    sampling: dict[str, Any]
    mean_logprob: float | None
    started_at: float
    first_token_at: float | None
    finished_at: float
    messages: tuple[dict[str, Any], ...]
    answer: dict[str, Any] | None
    request: dict[str, Any]
    tokens: TurnTokens | None
    masked: tuple[tuple[int, int], ...] = ()
    failure: str | None = None


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards that the step which consumed a session saw, beside those of the ledger now. `revised`: the reward
    of the session or of one of its turns is another now."""

    version: int
    claim_id: str | None
    reward_then: float | None
    reward_now: float | None
    revised: bool


class Trainability(msgspec.Struct, frozen=True, kw_only=True):
    """The training state of a session, and a sentence that says what would change it."""

    state: str
    explanation: str


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session: its turns in order of arrival, its rewards in order of the ledger. `untrained_turns` are the
    ids of those turns that are not trained, with the reasons."""

    session: SessionItem
    run: str
    metadata: dict[str, Any] | None
    trainability: Trainability
    trained: Trained | None
    turns: tuple[TurnView, ...]
    rewards: tuple[RewardItem, ...]
    preferences: tuple[PreferenceView, ...]
    untrained_turns: dict[str, str] = {}


class StepItem(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version and the step that made it; version 0 is the base model and has no step.

    `weights_removed_at`: since when the files of its weights may have been deleted to save space. `rejected_because`:
    why a version in the state `rejected` is not served.
    """

    version: int
    parent_version: int | None
    state: str
    created_at: float
    served_at: float | None
    swap_seconds: float | None
    weights: WeightsReference | None
    trajectories: int
    trained_tokens: int
    reward_mean: float | None
    staleness_mean: float | None
    staleness_max: int | None
    metrics: dict[str, float | None]
    weights_removed_at: float | None = None
    rejected_because: str | None = None


class RewardPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of consecutive rewarded sessions: how many there were up to its end, its own mean and the mean of
    the window of sessions that ends with it."""

    sessions: int
    at: float
    mean: float
    moving_mean: float


class StepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A version on the curves. `swap_seconds` is how long generation stood still for it."""

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
    """The series of a run's page, oldest first, each bounded to some hundred points. Beyond 20,000 sessions, `reward`
    may be a minute old."""

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
    """A message of the event stream: the run now, and what was logged since the last snapshot."""

    run: RunSummary
    events: tuple[EventItem, ...]
    last_event_id: int


class RunHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`trainer`: `active` (claimed, renewed or committed within the run's lease time), `away` (trajectories have
    waited for longer than that), `idle` (quiet, with nothing that waits for long) or `never` (no claim so far).
    `paused_because` is what was said when a run was paused that is so still. `rejected_version` is the newest
    version, if it was rejected, and `rejected_because` the reason. `mismatch` is the difference between engine and
    trainer, in nats a token, that the trainer warned of in its newest step; None: it did not."""

    id: str
    name: str
    state: str
    head_version: int
    serving_version: int
    trainer: str
    trainer_seen_at: float | None
    paused_because: str | None = None
    rejected_version: int | None = None
    rejected_because: str | None = None
    mismatch: float | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: model calls are served now. `status`: `ok`, or `degraded` with the `problems` in words.

    `database`: `ok`, `unwritable` (it answers, and takes no writes), `down` or `damaged`. `database_integrity`: of a
    SQLite file, `checking`, `ok`, `damaged`, or `unchecked` where the check failed; None on PostgreSQL.
    `engine_ready` is None where nothing watches an engine.
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


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, oldest first."""

    runs: tuple[RunSummary, ...]


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of sessions, newest first. `next_cursor` None: this was the last page. A filtered one may be short, or
    empty, and not be the last."""

    sessions: tuple[SessionItem, ...]
    next_cursor: str | None


class StepPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of steps, newest first. `next_cursor` None: this was the last page."""

    steps: tuple[StepItem, ...]
    next_cursor: str | None
