"""What Prometheus is told. A registry of our own, so that two apps in one process do not mix."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.contract.turn import Turn

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SWAP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Observer of requests, turns, sessions, rewards and swaps; its methods neither raise nor wait."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "base_rl_requests", "HTTP requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._request_seconds = Histogram(
            "base_rl_request_seconds",
            "From the first byte in to the last byte out.",
            ["route"],
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        self._turns = Counter(
            "base_rl_turns",
            "Recorded model calls.",
            ["continuation", "attributed_by", "state", "dialect"],
            registry=self.registry,
        )
        self._sessions_opened = Counter(
            "base_rl_sessions_opened", "Sessions opened.", ["attributed_by"], registry=self.registry
        )
        self._first_token_seconds = Histogram(
            "base_rl_first_token_seconds",
            "From a call's arrival to its first token.",
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
        tokens = Counter(
            "base_rl_tokens",
            "Tokens of recorded turns: output, prompt in all, and the part of the prompt reused from earlier turns.",
            ["kind"],
            registry=self.registry,
        )
        self._prompt_tokens = tokens.labels("prompt")
        self._reused_tokens = tokens.labels("reused")
        self._output_tokens = tokens.labels("output")
        self._rewards = Counter("base_rl_rewards", "Reward entries recorded.", ["effect"], registry=self.registry)
        self._swaps = Counter("base_rl_swaps", "Policy versions loaded.", ["result"], registry=self.registry)
        self._swap_seconds = Histogram(
            "base_rl_swap_seconds",
            "How long generation stood still for a new version.",
            buckets=_SWAP_SECONDS,
            registry=self.registry,
        )
        self._sessions = Gauge(
            "base_rl_sessions", "Sessions by training state.", ["run", "training"], registry=self.registry
        )

        # Looking a child up by its labels costs more than counting in it.
        self._of_requests: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._of_turns: dict[tuple[str, str, str, str], Counter] = {}

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """`route` is the path's pattern, not the path, so that its values stay few."""
        counted = self._of_requests.get((method, route, status))
        if counted is None:
            counted = self._requests.labels(method, route, str(status)), self._request_seconds.labels(route)
            self._of_requests[method, route, status] = counted
        requests, request_seconds = counted
        requests.inc()
        request_seconds.observe(seconds)

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        kind = (turn.continuation, attributed_by, turn.state, dialect)
        turns = self._of_turns.get(kind)
        if turns is None:
            turns = self._turns.labels(turn.continuation.value, attributed_by, turn.state.value, dialect)
            self._of_turns[kind] = turns
        turns.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._reused_tokens.inc(turn.prefix_tokens)
        self._output_tokens.inc(len(turn.output_ids))
        if turn.first_token_at is not None:
            self._first_token_seconds.observe(max(0.0, turn.first_token_at - turn.started_at))

    def session_opened(self, *, attributed_by: str) -> None:
        self._sessions_opened.labels(attributed_by).inc()

    def rewards_recorded(self, entries: int, *, effect: str) -> None:
        self._rewards.labels(effect).inc(entries)

    def swap_finished(self, seconds: float) -> None:
        self._swaps.labels("loaded").inc()
        self._swap_seconds.observe(seconds)

    def swap_failed(self) -> None:
        self._swaps.labels("failed").inc()

    def render(self, sessions: Mapping[tuple[str, str], int]) -> bytes:
        """The exposition, with `sessions` as (run, training state) → count."""
        self._sessions.clear()
        for (run, training), count in sessions.items():
            self._sessions.labels(run, training).set(count)
        return generate_latest(self.registry)
