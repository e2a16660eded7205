"""Metrics for Prometheus, in a registry per application, so that two applications in one process do not mix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from proxy.contract.turn import Turn

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
MOST_STEP_METRICS = 128
"""Bound per step: a trainer reports about seventy metrics, and one for each version of staleness."""
_SWAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Counts(Collector):
    """A counter for events of every call. It needs no lock, because only the event loop counts, and formats labels
    only when the metrics are read. The library's own counter costs ten times as much."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labelnames = name, text, labels
        self._counts: dict[tuple[object, ...], float] = {}
        registry.register(self)

    def add(self, labels: tuple[object, ...], amount: float = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def describe(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labelnames)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for labels, count in self._counts.items():
            family.add_metric([str(value) for value in labels], count)
        yield family


class _Seconds(Collector):
    """A histogram over `_REQUEST_SECONDS`, for the event loop alone like `_Counts`."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labelnames = name, text, labels
        self._observed: dict[tuple[object, ...], tuple[list[int], list[float]]] = {}
        registry.register(self)

    def add(self, labels: tuple[object, ...], seconds: float) -> None:
        observed = self._observed.get(labels)
        if observed is None:
            observed = self._observed[labels] = ([0] * (len(_REQUEST_SECONDS) + 1), [0.0])
        counts, total = observed
        counts[bisect_left(_REQUEST_SECONDS, seconds)] += 1
        total[0] += seconds

    def describe(self) -> Iterable[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labelnames)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        bounds = [*map(floatToGoString, _REQUEST_SECONDS), "+Inf"]
        for labels, (counts, total) in self._observed.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([str(value) for value in labels], buckets, total[0])
        yield family


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


class Activity(Protocol):
    """The part of the count of generations at the engine that the metrics read."""

    @property
    def generations(self) -> int: ...

    @property
    def busy_seconds(self) -> float: ...


class _EngineBusy(Collector):
    """Engine activity, read when the metrics are rendered instead of being counted twice."""

    def __init__(self, registry: CollectorRegistry, activity: Activity) -> None:
        self._activity = activity
        self._labelnames: tuple[str, ...] = ()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "base_rl_engine_generations",
            "Generations that this proxy has at the engine now.",
            value=self._activity.generations,
        )
        yield CounterMetricFamily(
            "base_rl_engine_busy_seconds",
            "Seconds in which this proxy had a generation at the engine.",
            value=self._activity.busy_seconds,
        )

    def describe(self) -> Iterable[Metric]:
        return self.collect()


class EngineFigures(Protocol):
    """The part of the view of an engine that the metrics read."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def calls(self) -> int: ...

    @property
    def outstanding_tokens(self) -> int: ...


_EngineViews = Callable[[], Sequence[EngineFigures]]


class _EngineStates(Collector):
    """The states of the engines, read when the metrics are rendered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.views: _EngineViews = tuple
        self._labelnames = ("engine", "state")
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("base_rl_engine_state", "1 for the engine's state.", labels=self._labelnames)
        for view in self.views():
            family.add_metric([view.name, view.state], 1)
        yield family

    def describe(self) -> Iterable[Metric]:
        return self.collect()


class _EngineLoads(Collector):
    """The load of each engine, read when the metrics are rendered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.views: _EngineViews = tuple
        self._labelnames = ("engine",)
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        calls = GaugeMetricFamily(
            "base_rl_engine_calls", "Calls of all proxies under way at the engine.", labels=self._labelnames
        )
        tokens = GaugeMetricFamily(
            "base_rl_engine_outstanding_tokens",
            "Prompts and allowed new tokens of these calls.",
            labels=self._labelnames,
        )
        for view in self.views():
            calls.add_metric([view.name], view.calls)
            tokens.add_metric([view.name], view.outstanding_tokens)
        return (calls, tokens)

    def describe(self) -> Iterable[Metric]:
        return self.collect()


class Metrics:
    """Observer of requests, turns, sessions, limits, rewards and swaps. Its methods neither raise nor wait."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.registry = CollectorRegistry()
        self._engine_states = _EngineStates(self.registry)
        self._engine_loads = _EngineLoads(self.registry)
        if activity is not None:
            _EngineBusy(self.registry, activity)
        self._requests = _Counts(
            self.registry, "base_rl_requests", "HTTP requests answered.", ("method", "route", "status")
        )
        self._request_seconds = _Seconds(
            self.registry, "base_rl_request_seconds", "From the first byte in to the last byte out.", ("route",)
        )
        self._turns = _Counts(
            self.registry,
            "base_rl_turns",
            "Recorded model calls.",
            ("continuation", "attributed_by", "state", "dialect"),
        )
        self._unrecorded = _Counts(
            self.registry,
            "base_rl_calls_unrecorded",
            "Model calls that were answered and are not in the store (database.when_unavailable).",
            ("reason", "dialect"),
        )
        self._sessions_opened = _Counts(
            self.registry, "base_rl_sessions_opened", "Sessions opened.", ("attributed_by",)
        )
        self._attempts_repeated = _Counts(
            self.registry,
            "base_rl_attempts_repeated",
            "Sessions opened as the second or a later attempt of a name.",
            ("attributed_by",),
        )
        self._limited = _Counts(
            self.registry,
            "base_rl_rate_limited_calls",
            "Calls that were refused for a limit of their run (run.limits).",
            ("limit", "run"),
        )
        self._connections_refused = _Counts(
            self.registry,
            "base_rl_connections_refused",
            "Connections and requests that ended at a bound of the server before they reached an endpoint.",
            ("reason",),
        )
        self._first_token_seconds = _Seconds(
            self.registry, "base_rl_first_token_seconds", "From a call's arrival to its first token.", ()
        )
        self._tokens = _Counts(
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
        self._job_seconds = _Seconds(
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
        if turn.first_token_at is not None:
            self._first_token_seconds.add((), max(0.0, turn.first_token_at - turn.started_at))

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
