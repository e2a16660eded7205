"""Findings of guards about a canary."""

from __future__ import annotations

import pytest

from proxy.gates.findings import Arm, guards_finding
from proxy.settings import ReleaseSettings

RELEASE = ReleaseSettings.model_validate(
    {
        "policy": "gated",
        "canary": {"share": 0.1, "sessions": 60},
        "guards": {"failed_calls": None, "cut_answers": None},
    }
)
OLD = Arm(versions=(0,), rewards=(), guards={"broken_tool_calls": (0.0,) * 200}, sessions=200)


def arm(*broken: float) -> Arm:
    return Arm(versions=(1,), rewards=(), guards={"broken_tool_calls": broken}, sessions=len(broken))


@pytest.mark.parametrize(
    ("broken", "state"),
    [
        ((0.0,) * 8, "passed"),
        ((1.0, 0.0, 0.0, 0.0) * 2, "waiting"),
        ((1.0, 0.0, 0.0, 0.0) * 15, "passed"),
        ((1.0,) * 20, "failed"),
    ],
)
def test_a_canary_waits_while_a_guard_has_risen_and_not_surely(broken: tuple[float, ...], state: str) -> None:
    found = guards_finding(RELEASE, arm(*broken), OLD, waits=True)
    assert found.state == state
    if state == "waiting":
        assert found.text.startswith(
            "waits for a clear answer, or 60 canary sessions: share of answers with a tool call"
        )


def test_the_watch_does_not_wait_for_guards() -> None:
    assert guards_finding(RELEASE, arm(*(1.0, 0.0, 0.0, 0.0) * 2), OLD).state == "passed"
