"""The views that the operating API, the admin page and the CLI show: frozen, JSON by field name.

Times are seconds since the epoch, UTC. None means unknown or missing, never zero. Later releases may add fields, but
never rename or remove one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.policy import WeightsReference
from proxy.contract.turn import VersionSpan
from proxy.overview.rewards.views import PreferenceView, RewardItem

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

    `late_rewards` counts entries that arrived after a trainer had claimed the session, `revised_sessions` the trained
    sessions whose rewards changed after the training. `not_learnt_because` lists sentences that explain why the run
    cannot have learnt anything yet (`overview/learning.py`); it is empty if the run may have learnt something.
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
    """A session in a list.

    `reward` is the current combined reward, `group` the group's name. `explanation` is a sentence on why the session
    is trained or not. An erased session has no client's name, task or texts.
    """

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
    """Token ids and log-probabilities of a turn. `output_texts` has one text per output id; None if the proxy cannot
    decode them."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    output_texts: tuple[str, ...] | None


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A model call with its text.

    `messages` are those that the call added; `answer` is the returned message, None if the call failed before there
    was one. `prefix_tokens` of the `prompt_tokens` are shared with the parent. `attributed_by` is the rule that
    assigned the call to its session. `tokens` is present only on request. `masked` are the redacted spans
    [start, end) over the turn's own prompt ids followed by its output ids. `failure` is the known cause of a failed
    call, with the engine's name.
    """

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
    """The reward that a session was trained on, beside its current one. `revised`: the reward of the session or of
    one of its turns has changed since."""

    version: int
    claim_id: str | None
    reward_then: float | None
    reward_now: float | None
    revised: bool


class Trainability(msgspec.Struct, frozen=True, kw_only=True):
    """The training state of a session, and a sentence on what would change it."""

    state: str
    explanation: str


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session, with turns and rewards in order of arrival. `untrained_turns` maps the ids of turns that are
    not trained to the reasons."""

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

    From `weights_removed_at` on, its weight files may have been deleted to save space. `rejected_because` is the
    reason why a version in the state `rejected` is not served.
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
    rejected, and `rejected_because` the reason. `mismatch` is the difference between engine and trainer, in nats per
    token, that the newest step reported as a warning; None without a warning.
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
    rejected_because: str | None = None
    mismatch: float | None = None


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


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """All runs, oldest first."""

    runs: tuple[RunSummary, ...]


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of sessions, newest first; the last page has no `next_cursor`. A page of a filtered list may be short or
    empty without being the last."""

    sessions: tuple[SessionItem, ...]
    next_cursor: str | None


class StepPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of steps, newest first; the last page has no `next_cursor`."""

    steps: tuple[StepItem, ...]
    next_cursor: str | None
