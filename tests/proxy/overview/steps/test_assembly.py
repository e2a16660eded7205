from __future__ import annotations

import json

import msgspec
import pytest

from proxy.contract.claim import TrajectoryAudit
from proxy.contract.identifiers import SessionId
from proxy.overview.steps.assembly import audit_of, step_facts, stored_step_facts


def test_staleness_of_a_step_is_weighted_by_trained_tokens_and_leaves_out_what_was_skipped() -> None:
    facts = step_facts([_audit(10, 0.0, 0, 1.0), _audit(30, 2.0, 3, 0.0), _audit(0, 9.0, 9, 0.5)])
    assert facts.staleness_mean == 1.5
    assert facts.staleness_max == 3
    assert facts.trained_tokens == 40
    assert facts.reward_mean == 0.5


@pytest.mark.parametrize("reward", [0.25, None])
def test_the_facts_of_a_stored_audit_are_those_of_the_audit(reward: float | None) -> None:
    stored = [msgspec.to_builtins(_audit(tokens, 1.5, 3, 0.5)) | {"reward": reward} for tokens in (10, 0, 5)]
    facts, expected = stored_step_facts(json.dumps(stored)), step_facts(audit_of(stored))
    assert repr(facts) == repr(expected)  # nan is not equal to itself


def test_a_step_without_recorded_tokens_is_shown_as_unknown() -> None:
    facts = step_facts([])
    assert (facts.reward_mean, facts.staleness_mean, facts.staleness_max) == (None, None, None)


def _audit(tokens: int, staleness: float, most: int, reward: float) -> TrajectoryAudit:
    return TrajectoryAudit(
        session_id=SessionId("ses_x"),
        reward=reward,
        advantage=0.0,
        trained_tokens=tokens,
        staleness_mean=staleness,
        staleness_max=most,
        logprob_gap_mean=0.0,
        logprob_gap_max=0.0,
        ratio_min=1.0,
        ratio_median=1.0,
        ratio_max=1.0,
        clipped_share=0.0,
    )
