from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, Turn, TurnState, VersionSpan
from proxy.metrics import Metrics


def values(metrics: Metrics, sessions: dict[tuple[str, str], int] | None = None) -> dict[tuple[str, str], float]:
    """(sample name, labels as text) → value."""
    exposition = metrics.render(sessions or {}).decode()
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


def test_sessions_are_as_of_now() -> None:
    metrics = Metrics()
    assert values(metrics, {("policy", "ready"): 3})["base_rl_sessions", "run=policy,training=ready"] == 3
    after = values(metrics, {("policy", "consumed"): 3})
    assert ("base_rl_sessions", "run=policy,training=ready") not in after
    assert after["base_rl_sessions", "run=policy,training=consumed"] == 3


def test_opened_sessions_are_counted_by_rule() -> None:
    metrics = Metrics()
    for rule in ("new", "user", "new"):
        metrics.session_opened(attributed_by=rule)
    seen = values(metrics)
    assert seen["base_rl_sessions_opened_total", "attributed_by=new"] == 2
    assert seen["base_rl_sessions_opened_total", "attributed_by=user"] == 1


def test_rewards_and_swaps() -> None:
    metrics = Metrics()
    metrics.rewards_recorded(3, effect="recorded")
    metrics.swap_finished(0.5)
    metrics.swap_failed()
    seen = values(metrics)
    assert seen["base_rl_rewards_total", "effect=recorded"] == 3
    assert (seen["base_rl_swaps_total", "result=loaded"], seen["base_rl_swaps_total", "result=failed"]) == (1, 1)
    assert seen["base_rl_swap_seconds_sum", ""] == 0.5
