"""Metrics for Prometheus, in a registry per application, so that two applications in one process do not mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.contract.turn import Turn, TurnState
from proxy.metrics.collectors import Activity, Counts, EngineBusy, EngineFigures, EngineLoads, EngineStates, Seconds

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

MOST_STEP_METRICS = 128
"""Bound per step: a trainer reports about seventy metrics, and one for each version of staleness."""
_SWAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class LastStep(NamedTuple):
    """The newest training step of a run: the version that it made, when (Unix seconds), and the trainer's metrics."""

    version: int
    at: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Figures from the store: `sessions` as (run, training state) → count, `revised` as run → count, `steps` by
    run, `jobs` as (kind, state) → count, `oldest_jobs` as kind → seconds for which a job has been due."""

    sessions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    revised: Mapping[str, int] = field(default_factory=dict)
    steps: Mapping[str, LastStep] = field(default_factory=dict)
    jobs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    oldest_jobs: Mapping[str, float] = field(default_factory=dict)


class Metrics:
    """Observer of requests, turns, sessions, limits, rewards and swaps. Its methods neither raise nor wait."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.registry = CollectorRegistry()
        self._engine_states = EngineStates(self.registry)
        self._engine_loads = EngineLoads(self.registry)
        if activity is not None:
            EngineBusy(self.registry, activity)
        self._requests = Counts(
            self.registry, "base_rl_requests", "HTTP requests answered.", ("method", "route", "status")
        )
        self._request_seconds = Seconds(
            self.registry, "base_rl_request_seconds", "From the first byte in to the last byte out.", ("route",)
        )
        self._turns = Counts(
            self.registry,
            "base_rl_turns",
            "Recorded model calls.",
            ("continuation", "attributed_by", "state", "dialect"),
        )
        self._unrecorded = Counts(
            self.registry,
            "base_rl_calls_unrecorded",
            "Model calls that were answered and are not in the store (database.when_unavailable).",
            ("reason", "dialect"),
        )
        self._shadows_dropped = Counts(
            self.registry,
            "base_rl_shadow_answers_dropped",
            "Shadow answers that were not recorded, by the reason.",
            ("reason",),
        )
        self._candidate_answers = Counts(
            self.registry,
            "base_rl_candidate_answers",
            "Candidates' answers that nobody sees, by their outcome.",
            ("outcome",),
        )
        self._sessions_opened = Counts(
            self.registry, "base_rl_sessions_opened", "Sessions opened.", ("attributed_by",)
        )
        self._attempts_repeated = Counts(
            self.registry,
            "base_rl_attempts_repeated",
            "Sessions opened as the second or a later attempt of a name.",
            ("attributed_by",),
        )
        self._limited = Counts(
            self.registry,
            "base_rl_rate_limited_calls",
            "Calls that were refused for a limit of their run (run.limits).",
            ("limit", "run"),
        )
        self._connections_refused = Counts(
            self.registry,
            "base_rl_connections_refused",
            "Connections and requests that ended at a bound of the server before they reached an endpoint.",
            ("reason",),
        )
        self._first_token_seconds = Seconds(
            self.registry, "base_rl_first_token_seconds", "From a call's arrival to its first token.", ()
        )
        self._tokens = Counts(
            self.registry,
            "base_rl_tokens",
            "Tokens of recorded turns: output, prompt in all, and the part of the prompt reused from earlier turns.",
            ("kind",),
        )
        self._rewards = Counter("base_rl_rewards", "Reward entries recorded.", ["effect"], registry=self.registry)
        self._feedback_texts = Counter(
            "base_rl_feedback_texts", "Texts of feedback recorded.", ["effect"], registry=self.registry
        )
        self._preferences = Counter("base_rl_preferences", "Preferences recorded.", registry=self.registry)
        self._judgements = Counter(
            "base_rl_judgements", "Attempts of judges at sessions, by outcome.", ["outcome"], registry=self.registry
        )
        self._judge_tokens = Counter(
            "base_rl_judge_tokens", "Tokens that judges used, by kind.", ["kind"], registry=self.registry
        )
        self._redacted = Counter(
            "base_rl_redacted_tokens", "Tokens of recorded turns that were redacted.", registry=self.registry
        )
        self._erased = Counter(
            "base_rl_sessions_erased", "Sessions whose content was erased.", ["reason"], registry=self.registry
        )
        self._swaps = Counter("base_rl_swaps", "Policy versions loaded.", ["result"], registry=self.registry)
        self._wrong_weights = Counter(
            "base_rl_wrong_weights",
            "Versions that an engine did not compute with, by the comparison after a load.",
            registry=self.registry,
        )
        self._swap_seconds = Histogram(
            "base_rl_swap_seconds",
            "How long generation stood still for a new version.",
            buckets=_SWAP_SECONDS,
            registry=self.registry,
        )
        self._sessions = Gauge(
            "base_rl_sessions", "Sessions by training state.", ["run", "training"], registry=self.registry
        )
        self._revised = Gauge(
            "base_rl_sessions_revised",
            "Trained sessions whose rewards are others now than those they were trained on.",
            ["run"],
            registry=self.registry,
        )
        self._step = Gauge(
            "base_rl_step", "Metrics of the run's newest training step.", ["run", "metric"], registry=self.registry
        )
        self._step_version = Gauge(
            "base_rl_step_version", "The version that it made.", ["run"], registry=self.registry
        )
        self._step_at = Gauge(
            "base_rl_step_timestamp_seconds", "When, in Unix time.", ["run"], registry=self.registry
        )

        self._jobs = Gauge(
            "base_rl_jobs", "Unfinished and dead background jobs by state.", ["kind", "state"], registry=self.registry
        )
        self._oldest_job = Gauge(
            "base_rl_job_oldest_seconds",
            "For how long the job that has been due longest has been waiting.",
            ["kind"],
            registry=self.registry,
        )
        self._job_seconds = Seconds(
            self.registry,
            "base_rl_job_seconds",
            "Attempts at background jobs, by how they ended.",
            ("kind", "outcome"),
        )

    def watch_engines(self, views: Callable[[], Sequence[EngineFigures]]) -> None:
        """Report the engines that `views` returns at the time."""
        self._engine_states.views = self._engine_loads.views = views

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the path's pattern instead of the path, so that the label has few values."""
        self._requests.add((method, route, status))
        self._request_seconds.add((route,), seconds)

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        self._turns.add((turn.continuation, attributed_by, turn.state, dialect))
        self._tokens.add(("prompt",), prompt_tokens)
        self._tokens.add(("reused",), turn.prefix_tokens)
        self._tokens.add(("output",), len(turn.output_ids))
        # A shadow answer begins long after the call.
        if turn.first_token_at is not None and turn.state is not TurnState.SHADOW:
            self._first_token_seconds.add((), max(0.0, turn.first_token_at - turn.started_at))

    def shadow_dropped(self, *, reason: str) -> None:
        self._shadows_dropped.add((reason,))

    def candidate_answered(self, *, outcome: str) -> None:
        self._candidate_answers.add((outcome,))

    def call_unrecorded(self, *, reason: str, dialect: str) -> None:
        self._unrecorded.add((reason, dialect))

    def session_opened(self, *, attributed_by: str, attempt: int) -> None:
        self._sessions_opened.add((attributed_by,))
        if attempt > 1:
            self._attempts_repeated.add((attributed_by,))

    def call_limited(self, *, limit: str, run: str) -> None:
        self._limited.add((limit, run))

    def connection_refused(self, *, reason: str) -> None:
        self._connections_refused.add((reason,))

    def rewards_recorded(self, entries: int, *, effect: str) -> None:
        self._rewards.labels(effect).inc(entries)

    def text_recorded(self, *, effect: str) -> None:
        self._feedback_texts.labels(effect).inc()

    def preference_recorded(self) -> None:
        self._preferences.inc()

    def session_judged(self, *, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        self._judgements.labels(outcome).inc()
        self._judge_tokens.labels("prompt").inc(prompt_tokens)
        self._judge_tokens.labels("completion").inc(completion_tokens)

    def tokens_redacted(self, tokens: int) -> None:
        self._redacted.inc(tokens)

    def sessions_erased(self, sessions: int, *, reason: str) -> None:
        self._erased.labels(reason).inc(sessions)

    def swap_finished(self, seconds: float) -> None:
        self._swaps.labels("loaded").inc()
        self._swap_seconds.observe(seconds)

    def swap_failed(self) -> None:
        self._swaps.labels("failed").inc()

    def weights_wrong(self) -> None:
        self._wrong_weights.inc()

    def job_ended(self, *, kind: str, outcome: str, seconds: float) -> None:
        self._job_seconds.add((kind, outcome), seconds)

    def render(self, stored: Stored) -> bytes:
        """Return the metrics in Prometheus's text format. Unknown figures are left out."""
        self._sessions.clear()
        for (run, training), count in stored.sessions.items():
            self._sessions.labels(run, training).set(count)
        self._revised.clear()
        for run, count in stored.revised.items():
            self._revised.labels(run).set(count)
        for gauge in (self._step, self._step_version, self._step_at, self._jobs, self._oldest_job):
            gauge.clear()
        for (kind, state), count in stored.jobs.items():
            self._jobs.labels(kind, state).set(count)
        for kind, seconds in stored.oldest_jobs.items():
            self._oldest_job.labels(kind).set(seconds)
        for run, step in stored.steps.items():
            self._step_version.labels(run).set(step.version)
            self._step_at.labels(run).set(step.at)
            for metric in sorted(step.metrics)[:MOST_STEP_METRICS]:
                self._step.labels(run, metric).set(step.metrics[metric])
        return generate_latest(self.registry)
