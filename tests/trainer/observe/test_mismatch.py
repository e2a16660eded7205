"""An engine that computes other log-probabilities than the trainer causes a warning, and later a pause of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.real_proxy import real_proxy, write_real_model
from tests.trainer.tiny import ALONE
from trainer.config import MismatchSettings
from trainer.observe.mismatch import GapWatch


class Pauses:
    """A stand-in for the claims that records the reasons of pauses."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def pause_run(self, reason: str) -> None:
        self.reasons.append(reason)


def watched(gaps: list[float | None], **settings: Any) -> tuple[list[bool], list[int]]:
    """Return, for these gaps of the steps to versions 1, 2, …, which steps warned, and which versions paused."""
    claims = Pauses()
    watch = GapWatch(ALONE, claims, MismatchSettings(**settings))  # type: ignore[arg-type]
    warned, paused = [], []
    for version, gap in enumerate(gaps, 1):
        warned.append(bool(watch.metrics(gap)))
        before = len(claims.reasons)
        watch.stepped(version, gap)
        if len(claims.reasons) > before:
            paused.append(version)
    return warned, paused


@given(
    gaps=st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.9, None]), max_size=20),
    steps=st.integers(1, 4),
)
def test_only_steps_in_a_row_above_the_bounds_warn_and_pause(gaps: list[float | None], steps: int) -> None:
    warned, paused = watched(gaps, warn_above=0.1, pause_above=0.5, steps=steps)
    far = above = 0
    for version, (gap, warning) in enumerate(zip(gaps, warned, strict=True), 1):
        if gap is not None:
            above = above + 1 if gap > 0.1 else 0
            far = far + 1 if gap > 0.5 else 0
        assert warning is (gap is not None and above >= steps)
        assert (version in paused) is (far >= steps)
        if version in paused:
            far = above = 0


def test_without_bounds_there_is_no_warning() -> None:
    assert watched([9.0] * 9, warn_above=0, pause_above=0) == ([False] * 9, [])


def test_a_pause_below_the_warning_is_refused() -> None:
    with pytest.raises(ValueError, match="warn_above"):
        MismatchSettings(warn_above=0.5, pause_above=0.1)


def test_an_engine_with_wrong_log_probabilities_causes_a_warning_and_a_pause(tmp_path: Path) -> None:
    """The recorded log-probabilities are invented, and far from those of the model under the version that they
    name."""
    with (
        real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy,
        proxy.trainer(batch={"trajectories": 2}, mismatch={"warn_above": 0.1, "pause_above": 0.5, "steps": 2}) as it,
    ):
        for version in range(2):
            assert proxy.get("")["state"] == "active"
            proxy.group([1.0, 0.0], version=version)
            it.loop.step()
        first, second = (proxy.get(f"/steps/{version}")["step"]["metrics"] for version in (1, 2))
        assert first["logprob_gap_fresh"] > 0.5
        assert "mismatch_warning" not in first
        assert second["mismatch_warning"] == second["logprob_gap_fresh"]
        assert proxy.get("")["state"] == "paused"
        (paused,) = [each for each in proxy.problems() if "is paused" in each]
        (disagree,) = [each for each in proxy.problems() if "disagree by" in each]
        assert "in 2 steps in a row, up to version 2" in paused
        assert "base-rl status" in paused
        assert "as of version 2" in disagree
        proxy.post("/resume")
        proxy.group([1.0, 0.0], version=0)
        it.loop.step()
        assert it.loop.head.version == 3
        assert "logprob_gap_fresh" not in proxy.get("/steps/3")["step"]["metrics"], "its tokens are two versions old"
        assert proxy.problems() == []
