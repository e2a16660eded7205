"""Answers that were cut, from the store through claim, step and commit to what is shown of them."""

from __future__ import annotations

from pathlib import Path

from proxy.contract.turn import FinishReason
from tests.trainer.real_proxy import real_proxy, write_real_model

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_cut_answers_are_masked_and_shown(tmp_path: Path) -> None:
    with real_proxy(tmp_path, write_real_model(tmp_path / "base")) as proxy:
        group = proxy.do(proxy.world.group(size=3))
        whole = proxy.session(1.0, group=group)
        cut_at_the_end = proxy.session(0.0, group=group, ends=(STOP, LENGTH))
        all_cut = proxy.session(0.0, group=group, ends=(LENGTH, LENGTH))
        with proxy.trainer(batch={"trajectories": 3}) as trainer:
            trainer.loop.step()
            assert trainer.loop.head.version == 1
        step = proxy.get("/steps/1")

    audits = {entry["audit"]["session_id"]: entry["audit"] for entry in step["trajectories"]}
    assert {name: audit["trained_tokens"] for name, audit in audits.items()} == {
        whole: 9,
        cut_at_the_end: 4,
        all_cut: 0,
    }
    assert (audits[all_cut]["skipped"], len(audits[all_cut]["masked"])) == ("truncated", 2)
    assert [turn["reason"] for turn in audits[cut_at_the_end]["masked"]] == ["length"]
    assert audits[whole]["masked"] == []
    metrics = step["step"]["metrics"]
    assert (metrics["answers"], metrics["cut_answer_share"], metrics["masked_length"]) == (6.0, 0.5, 3.0)
    assert metrics["skipped_truncated"] == 1.0
