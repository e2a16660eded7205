"""Candidates that answer prompts unseen: their pairs, a judge's preference, and the decision, on the real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.auth.service import Credentials
from proxy.contract.turn import FinishReason, TurnState
from proxy.gates.keeper import GateKeeper
from proxy.judges.repository import JudgementRepository
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.settings import RunSettings
from proxy.versions.release import read_tracks
from proxy.versions.steering import Decision
from tests.proxy.gates.shadowed import ANSWERS, SHADOW, TASTE, Shadowed, open_shadowed
from tests.proxy.judges.model_server import completion, refusal
from tests.proxy.judges.test_comparisons import answers, shown
from tests.proxy.versions.publishing import steering_of


@pytest.fixture
async def shadowed(database_url: str, tmp_path: Path) -> AsyncIterator[Shadowed]:
    async with open_shadowed(database_url, tmp_path) as here:
        yield here


async def shadow_of(here: Shadowed) -> list[tuple[int, bool, float | None]]:
    """Return the version, `is_shadow` and the share of sessions of each track."""
    run = await here.world.current_run()
    tracks = await here.world.database.read(lambda connection: read_tracks(connection, [run]))
    return [(each.version, each.is_shadow, each.share) for each in tracks.get(run.id, ())]


async def test_a_candidate_whose_answers_a_judge_finds_worse_is_rejected_with_the_reason(shadowed: Shadowed) -> None:
    await shadowed.candidate()
    assert await shadow_of(shadowed) == [(1, True, 0.0)], "it answers no session"
    assert await shadowed.world.events("version.shadow") == [{"version": 1, "share": 1.0, "by": "gates"}]
    for _ in range(14):
        assert await shadowed.pair(1, "bad")
    await shadowed.tend()
    found = await shadowed.finding(1, "preference")
    assert (found.state, found.evidence["unjudged"]) == ("waiting", 14)
    assert set(await shadowed.run_jobs()) == {"done"}
    await shadowed.tend()
    assert await shadowed.states() == ["serving", "rejected"]
    (event,) = await shadowed.world.events("version.rejected")
    assert event["reason"].startswith("it is worse: the judge 'taste' prefers its answers in 0.000 of 14 pairs")
    found = await shadowed.finding(1, "preference")
    assert (found.state, found.evidence["worse"], found.evidence["curve"][-1][0]) == ("failed", 14, 14)
    assert (await shadowed.finding(1, "shadow")).state == "waiting"
    assert not await shadowed.pair(1, "bad"), "and no further answer is wanted"
    assert len(await shadowed.rows()) == 14


async def test_a_good_candidate_passes_and_a_canary_keeps_what_was_found(shadowed: Shadowed) -> None:
    await shadowed.use({**SHADOW, "canary": {"share": 0.5, "sessions": 20}})
    await shadowed.candidate()
    for _ in range(ANSWERS):
        await shadowed.pair(1, "better than good")
    await shadowed.run_jobs()
    await shadowed.tend()
    assert await shadowed.states() == ["serving", "canary"]
    assert await shadow_of(shadowed) == [(1, False, 0.5)]
    # Another version begins to serve. The findings stay, although they are about pairs with the version before.
    await shadowed.commit(1)
    await steering_of(shadowed.world).pin(await shadowed.world.current_run(), 0, Decision(reason="demo", by="key_1"))
    await shadowed.tend()
    for gate in ("shadow", "preference"):
        assert (await shadowed.finding(1, gate)).state == "passed"
    await shadowed.sessions(0, [1.0] * 30)
    await shadowed.sessions(1, [1.0] * 30)
    await shadowed.tend()
    assert (await shadowed.states())[1] == "committed"


async def test_each_pair_is_asked_about_in_both_orders_with_what_came_before(shadowed: Shadowed) -> None:
    await shadowed.candidate()
    await shadowed.pair(1, "better than good")
    assert await shadowed.run_jobs() == ["done"]
    first, second = shadowed.model.requests
    assert answers(first) == {"1": "good", "2": "better than good"}
    assert answers(second) == {"1": "better than good", "2": "good"}
    assert shown(first)["context"] == [{"role": "user", "content": "what is 2 + 2?"}]
    (row,) = await shadowed.rows()
    assert (row.preference, row.is_consistent, row.judge) == (1.0, True, "taste")
    assert (row.prompt_tokens, row.completion_tokens) == (200, 20)
    assert row.cost == pytest.approx(240e-6)
    assert shadowed.judged.outcomes == ["compared"]
    run_id = shadowed.world.run_id
    used = await shadowed.world.database.read(
        lambda connection: (
            JudgementRepository(connection).tokens_since(run_id, "taste", 0.0),
            JudgementRepository(connection).totals(run_id)["taste"]["compared"],
        )
    )
    assert used == (220, 1), "the judge's budget and page count them"


async def test_a_judge_that_always_names_the_first_place_has_compared_nothing(shadowed: Shadowed) -> None:
    await shadowed.use({**SHADOW, "preference": {"judge": "taste", "undecided": "reject"}})
    await shadowed.candidate()
    for _ in range(ANSWERS):
        await shadowed.pair(1, "evil")  # as long as "good": the judge then names the first
    await shadowed.run_jobs()
    await shadowed.tend()
    (event,) = await shadowed.world.events("version.rejected")
    assert event["reason"].startswith("no preference was found (preference.undecided): the judge 'taste' chose by")


async def test_a_judge_of_another_kind_lends_its_model_and_its_criteria(shadowed: Shadowed) -> None:
    await shadowed.use(SHADOW, kind="rubric", rubric="Is the answer polite?", low=-1.0)
    await shadowed.candidate()
    await shadowed.pair(1, "better than good")
    assert await shadowed.run_jobs() == ["done"]
    assert "Is the answer polite?" in shadowed.model.requests[0]["messages"][0]["content"]
    assert '"better": "1", "2" or "neither"' in shadowed.model.requests[0]["messages"][0]["content"]
    (row,) = await shadowed.rows()
    assert row.preference == 1.0


async def test_broken_answers_are_refused_by_the_guards_without_a_judge(shadowed: Shadowed) -> None:
    await shadowed.use({"policy": "gated", "shadow": SHADOW["shadow"]})
    await shadowed.candidate()
    for number in range(ANSWERS):
        wanted = await shadowed.pair(1, '<tool_call>{"name": ', finish_reason=FinishReason.LENGTH)
        assert wanted is (number < ANSWERS - 1), "without a judge, no pair is needed beyond these"
    await shadowed.tend()
    (event,) = await shadowed.world.events("version.rejected")
    assert "share of answers with a tool call that cannot be read is 1.000, and 0.000 of version 0" in event["reason"]
    assert "share of answers cut at their bound on tokens is 1.000" in event["reason"]
    assert shadowed.model.requests == []


async def test_failed_answers_count_against_the_candidate_and_are_not_shown_to_the_judge(shadowed: Shadowed) -> None:
    await shadowed.candidate()
    for _ in range(ANSWERS):
        await shadowed.pair(1, "", state=TurnState.FAILED)
    assert await shadowed.run_jobs() == []
    await shadowed.tend()
    (event,) = await shadowed.world.events("version.rejected")
    assert event["reason"].startswith("share of failed calls is 1.000, and 0.000 of version 0")


async def test_only_one_version_at_a_time_is_on_trial_and_the_newest_that_is_ready_comes_next(
    shadowed: Shadowed,
) -> None:
    await shadowed.candidate()
    await shadowed.commit(1)
    await shadowed.tend()
    await shadowed.commit(2)
    await shadowed.tend()
    assert [version for version, _, _ in await shadow_of(shadowed)] == [1]
    waiting = await shadowed.finding(3, "shadow")
    assert waiting.text == "waits until the gates before it have passed, and no other version is on trial"
    await steering_of(shadowed.world).promote(
        await shadowed.world.current_run(), 1, Decision(reason="looks good", by="key_1")
    )
    await shadowed.serve()
    await shadowed.tend()
    assert await shadow_of(shadowed) == [(3, True, 0.0)]


async def test_bounds_come_before_the_shadow(shadowed: Shadowed) -> None:
    await shadowed.use({**SHADOW, "evaluation": {"suite": "held-out"}})
    await shadowed.commit(0)
    await shadowed.tend()
    await shadowed.tend()
    assert await shadow_of(shadowed) == [(1, False, 0.0)], "its engine is for the evaluation"
    assert (await shadowed.finding(1, "shadow")).state == "waiting"
    assert not await shadowed.pair(1, "better"), "it is not its turn"


async def test_evidence_and_judgements_survive_a_restart_and_count_once(shadowed: Shadowed) -> None:
    world = shadowed.world
    await shadowed.candidate()
    for _ in range(7):
        await shadowed.pair(1, "bad")
    await shadowed.run_jobs()
    asked = len(shadowed.model.requests)
    # Another proxy goes on, with nothing in memory.
    other = GateKeeper(database=world.database, runs=world.runs, signals=world.signals, clock=world.clock)
    for _ in range(7):
        await shadowed.pair(1, "bad")
    await shadowed.run_jobs()
    assert len(shadowed.model.requests) == 2 * asked
    await other.tend()
    await shadowed.tend()
    assert len(await world.events("version.rejected")) == 1
    assert (await shadowed.finding(1, "preference")).evidence["comparisons"] == 14


async def test_pairs_with_another_serving_version_do_not_count(shadowed: Shadowed) -> None:
    await shadowed.candidate()
    for _ in range(14):
        await shadowed.pair(1, "bad", against=7)
    await shadowed.run_jobs()
    await shadowed.tend()
    assert (await shadowed.finding(1, "preference")).evidence["comparisons"] == 0


async def test_an_erased_session_takes_its_pair_with_it(shadowed: Shadowed) -> None:
    await shadowed.candidate()
    await shadowed.pair(1, "a secret")
    await shadowed.pair(1, "another")
    (first, _) = await shadowed.rows()
    world = shadowed.world
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    erasing = EraseService(world.database, world.runs, credentials, world.signals, world.clock)
    await erasing.erase(ErasureTarget(session=first.session_id))
    assert (await shadowed.rows())[0].response == {}
    assert await shadowed.run_jobs() == ["done", "done"]
    assert len(shadowed.model.requests) == 2, "about the other pair"
    await shadowed.tend()
    assert (await shadowed.finding(1, "shadow")).evidence["pairs"] == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (refusal(401, "no such key"), "answered 401 for 'critic'"),
        (completion("I like both"), "0 of 2 answers of the judge are valid"),
    ],
)
async def test_a_gate_says_why_its_judge_does_not_answer_and_times_out(
    shadowed: Shadowed, answer: httpx.Response, problem: str
) -> None:
    await shadowed.use({**SHADOW, "timeout_seconds": 60})
    shadowed.model.answers = [answer]  # type: ignore[list-item]
    await shadowed.candidate()
    await shadowed.pair(1, "better")
    await shadowed.run_jobs()
    await shadowed.tend()
    assert problem in (await shadowed.finding(1, "preference")).text
    shadowed.world.clock.now += 60
    await shadowed.tend()
    (event,) = await shadowed.world.events("version.rejected")
    assert event["reason"].startswith(
        "not decided within 60 s (release.timeout_seconds): waits for 20 unseen answers"
    )


@pytest.mark.parametrize(
    ("judges", "problem"),
    [
        ({}, "the run has no judge 'taste': add [run.judges.taste] with a model"),
        ({"taste": {"kind": "verifier", "url": "https://example.com"}}, "kind verifier cannot compare two answers"),
        ({"taste": {**TASTE, "kind": "follow_up"}}, "kind follow_up cannot compare two answers"),
    ],
)
def test_a_preference_needs_a_judge_that_can_compare(judges: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("[", r"\[")):
        RunSettings.model_validate({"name": "policy", "judges": judges, "release": SHADOW})
