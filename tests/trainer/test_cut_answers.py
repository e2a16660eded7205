"""Cut answers, from the store through claim, step and commit to the pages."""

from __future__ import annotations

from pathlib import Path

import httpx
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.contract.turn import FinishReason
from tests.trainer.real_proxy import ADMIN, RUN, real_proxy, write_real_model

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
        proxy.get_when("", lambda run: run["cut_share"] == 0.5)
        as_admin = {"authorization": f"Bearer {ADMIN}"}
        views = {
            name: httpx.get(f"{proxy.url}/v1/sessions/{name}", headers=as_admin).json()
            for name in (cut_at_the_end, all_cut)
        }
        operating = httpx.get(f"{proxy.url}/api/v1/sessions/{cut_at_the_end}", headers=as_admin).json()
        with httpx.Client(base_url=proxy.url) as browser:
            browser.post("/admin/login", data={"key": ADMIN}, headers={"origin": proxy.url})
            paths = (f"sessions/{cut_at_the_end}", f"runs/{RUN}", f"runs/{RUN}/steps/1")
            session_page, run_page, step_page = [browser.get(f"/admin/{path}").text for path in paths]
        drawn = (
            CliRunner()
            .invoke(
                app,
                ["steps", "show", RUN, "1", "--url", proxy.url, "--api-key", ADMIN],
                env={"COLUMNS": "250"},
                catch_exceptions=False,
            )
            .output
        )

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

    cut_turn = audits[cut_at_the_end]["masked"][0]["turn_id"]
    because = {cut_turn: "it was cut by its bound on tokens"}
    assert (views[cut_at_the_end]["untrained_turns"], operating["untrained_turns"]) == (because, because)
    assert "Version 1 consumed it and learnt nothing from it: its answers were cut" in views[all_cut]["explanation"]
    for said in ("4 (1 masked: length)", "skipped: truncated", "masked length", "cut answer share"):
        assert said in drawn
    assert "Not trained: it was cut by its bound on tokens." in session_page
    assert "cut, length</span>" in session_page
    assert "% cut</span>" in run_page
    assert "1 masked: length</span>" in step_page
    assert "2 masked: length</span>" in step_page
