"""Collectors that cost little where events are counted, and read figures when the metrics are rendered."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Counts(Collector):
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


class Seconds(Collector):
    """A histogram over `_REQUEST_SECONDS`, for the event loop alone like `Counts`."""

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


class Activity(Protocol):
    """The part of the count of generations at the engine that the metrics read."""

    @property
    def generations(self) -> int: ...

    @property
    def busy_seconds(self) -> float: ...


class EngineBusy(Collector):
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


class EngineStates(Collector):
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


class EngineLoads(Collector):
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
