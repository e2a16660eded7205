from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, Turn, TurnState, VersionSpan
from proxy.engines.activity import EngineActivity
from proxy.metrics import MOST_STEP_METRICS, LastStep, Metrics, Stored


def values(
    metrics: Metrics,
    sessions: dict[tuple[str, str], int] | None = None,
    revised: dict[str, int] | None = None,
    steps: dict[str, LastStep] | None = None,
) -> dict[tuple[str, str], float]:
    """Return (sample name, labels as text) → value."""
    exposition = metrics.render(Stored(sessions=sessions or {}, revised=revised or {}, steps=steps or {})).decode()
    return {
        (sample.name, ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def turn() -> Turn:
    return Turn(
        id=TurnId("turn_1"),
        session_id=SessionId("ses_1"),
        parent_id=TurnId("turn_0"),
        prefix_tokens=7,
        prompt_ids=(1, 2, 3),
        output_ids=(4, 5),
        output_logprobs=(-0.1, -0.2),
        spans=(VersionSpan(version=3, start=0, end=2),),
        sampling=SamplingParameters(max_new_tokens=8),
        finish_reason=FinishReason.STOP,
        continuation=Continuation.EXACT,
        state=TurnState.COMPLETE,
        started_at=100.0,
        first_token_at=100.25,
        finished_at=101.0,
    )


def test_a_turn_is_counted_with_its_tokens() -> None:
    metrics = Metrics()
    metrics.turn_finished(turn(), attributed_by="path", prompt_tokens=10, dialect="chat")
    seen = values(metrics)
    labels = "attributed_by=path,continuation=exact,dialect=chat,state=complete"
    assert seen["base_rl_turns_total", labels] == 1
    assert [seen["base_rl_tokens_total", f"kind={kind}"] for kind in ("prompt", "reused", "output")] == [10, 7, 2]
    assert seen["base_rl_first_token_seconds_sum", ""] == 0.25


def test_requests_are_counted_and_measured_by_route() -> None:
    metrics = Metrics()
    for route, status, seconds in (("/a", 200, 0.002), ("/a", 200, 0.0021), ("/a", 500, 700.0), ("/b", 200, 0.1)):
        metrics.request_finished(method="POST", route=route, status=status, seconds=seconds)
    seen = values(metrics)
    assert seen["base_rl_requests_total", "method=POST,route=/a,status=200"] == 2
    assert seen["base_rl_requests_total", "method=POST,route=/a,status=500"] == 1
    buckets = [
        seen["base_rl_request_seconds_bucket", f"le={bound},route=/a"] for bound in ("0.002", "0.005", "600.0")
    ]
    assert buckets == [1, 2, 2]
    assert seen["base_rl_request_seconds_bucket", "le=+Inf,route=/a"] == 3
    assert seen["base_rl_request_seconds_count", "route=/a"] == 3
    assert seen["base_rl_request_seconds_sum", "route=/a"] == pytest.approx(700.0041)
    assert seen["base_rl_request_seconds_count", "route=/b"] == 1


def test_the_exposition_is_the_librarys() -> None:
    """The library's own instruments with the same observations give the same text, except for creation times."""
    metrics, registry = Metrics(), CollectorRegistry()
    requests = Counter(
        "base_rl_requests", "HTTP requests answered.", ["method", "route", "status"], registry=registry
    )
    bounds = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
    measured = Histogram(
        "base_rl_request_seconds",
        "From the first byte in to the last byte out.",
        ["route"],
        buckets=bounds,
        registry=registry,
    )
    for route, status, seconds in (("/a", 200, 0.0), ("/a", 200, 0.003), ('/b"', 404, 0.25), ("/b", 200, 1e9)):
        metrics.request_finished(method="GET", route=route, status=status, seconds=seconds)
        requests.labels("GET", route, str(status)).inc()
        measured.labels(route).observe(seconds)
    ours = [line for line in metrics.render(Stored()).decode().splitlines() if "base_rl_request" in line]
    theirs = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert sorted(ours) == sorted(theirs)


def test_sessions_are_as_of_now() -> None:
    metrics = Metrics()
    assert values(metrics, {("policy", "ready"): 3})["base_rl_sessions", "run=policy,training=ready"] == 3
    after = values(metrics, {("policy", "consumed"): 3})
    assert ("base_rl_sessions", "run=policy,training=ready") not in after
    assert after["base_rl_sessions", "run=policy,training=consumed"] == 3


def test_revised_sessions_are_as_of_now_and_preferences_are_counted() -> None:
    metrics = Metrics()
    assert values(metrics, revised={"policy": 2})["base_rl_sessions_revised", "run=policy"] == 2
    assert ("base_rl_sessions_revised", "run=policy") not in values(metrics)
    for _ in range(2):
        metrics.preference_recorded()
    assert values(metrics)["base_rl_preferences_total", ""] == 2


def test_opened_sessions_are_counted_by_rule() -> None:
    metrics = Metrics()
    for rule in ("new", "user", "new"):
        metrics.session_opened(attributed_by=rule, attempt=1)
    seen = values(metrics)
    assert seen["base_rl_sessions_opened_total", "attributed_by=new"] == 2
    assert seen["base_rl_sessions_opened_total", "attributed_by=user"] == 1


def test_refused_calls_are_counted_by_limit_and_run() -> None:
    metrics = Metrics()
    for limit in ("calls_per_minute", "max_waiting", "calls_per_minute"):
        metrics.call_limited(limit=limit, run="policy")
    seen = values(metrics)
    assert seen["base_rl_rate_limited_calls_total", "limit=calls_per_minute,run=policy"] == 2
    assert seen["base_rl_rate_limited_calls_total", "limit=max_waiting,run=policy"] == 1


def test_rewards_texts_and_swaps() -> None:
    metrics = Metrics()
    metrics.text_recorded(effect="recorded_after_training")
    metrics.rewards_recorded(3, effect="recorded")
    metrics.swap_finished(0.5)
    metrics.swap_failed()
    seen = values(metrics)
    assert seen["base_rl_rewards_total", "effect=recorded"] == 3
    assert seen["base_rl_feedback_texts_total", "effect=recorded_after_training"] == 1
    assert (seen["base_rl_swaps_total", "result=loaded"], seen["base_rl_swaps_total", "result=failed"]) == (1, 1)
    assert seen["base_rl_swap_seconds_sum", ""] == 0.5


def test_only_the_newest_step_of_a_run_is_exported() -> None:
    metrics = Metrics()
    first = values(metrics, steps={"policy": LastStep(3, 1000.5, {"reward_mean": 0.25, "kl_reference": 0.1})})
    assert first["base_rl_step", "metric=reward_mean,run=policy"] == 0.25
    assert first["base_rl_step_version", "run=policy"] == 3
    assert first["base_rl_step_timestamp_seconds", "run=policy"] == 1000.5
    after = values(metrics, steps={"policy": LastStep(4, 1001.0, {"reward_mean": 0.5})})
    assert after["base_rl_step", "metric=reward_mean,run=policy"] == 0.5
    assert ("base_rl_step", "metric=kl_reference,run=policy") not in after


def test_a_step_of_many_metrics_does_not_flood_prometheus() -> None:
    many = {f"staleness_share_{age}": 0.0 for age in range(10 * MOST_STEP_METRICS)} | {"entropy": 1.0}
    seen = values(Metrics(), steps={"policy": LastStep(1, 0.0, many)})
    assert sum(name == "base_rl_step" for name, _ in seen) == MOST_STEP_METRICS
    assert seen["base_rl_step", "metric=entropy,run=policy"] == 1.0


def test_the_engine_reports_its_busy_time() -> None:
    now = [100.0]
    activity = EngineActivity(lambda: now[0])
    metrics = Metrics(activity)
    activity.begin()
    activity.begin()
    now[0] = 103.0
    activity.end()
    seen = values(metrics)
    assert seen["base_rl_engine_generations", ""] == 1
    assert seen["base_rl_engine_busy_seconds_total", ""] == 3.0
