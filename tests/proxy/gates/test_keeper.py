"""Candidates pass their gates or are refused, and a bad version that serves is taken back."""

from __future__ import annotations

import pytest

from proxy.contract.turn import TurnState
from proxy.gates.keeper import GateKeeper
from proxy.overview.health import HealthCheck
from proxy.settings import ReleaseSettings
from proxy.versions.steering import Decision
from tests.proxy.gates.conftest import CANARY, Gated
from tests.proxy.versions.publishing import steering_of

GOOD, BAD = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]


async def test_a_good_candidate_becomes_the_canary_and_then_serves(gated: Gated) -> None:
    await gated.commit(0)
    assert (await gated.states(), await gated.serve()) == (["serving", "candidate"], 0)
    await gated.tend()
    assert await gated.states() == ["serving", "canary"]
    await gated.sessions(0, GOOD * 15)
    await gated.sessions(1, GOOD * 10)
    await gated.tend()
    assert (await gated.finding(1, "canary")).state == "waiting"
    assert "waits for a clear answer, or 60 canary sessions" in (await gated.finding(1, "canary")).text
    await gated.sessions(1, GOOD * 5)
    await gated.tend()
    assert await gated.states() == ["serving", "committed"]
    assert await gated.serve() == 1
    assert await gated.states() == ["retired", "serving"]
    (event,) = await gated.world.events("version.promoted")
    assert event == {"version": 1, "before": 0, "reason": "its gates passed", "by": "gates"}
    assert (await gated.finding(1, "canary")).evidence["curve"][-1][0] == 60


async def test_a_bad_candidate_is_refused_with_what_was_made_from_it(gated: Gated) -> None:
    await gated.commit(0)
    await gated.tend()
    await gated.commit(1)
    assert await gated.head() == 2, "the trainer went on meanwhile"
    await gated.sessions(0, GOOD * 15)
    bad = await gated.sessions(1, BAD * 10)
    await gated.tend()
    assert await gated.states() == ["serving", "rejected", "rolled_back"]
    assert (await gated.head(), await gated.serve()) == (0, 0)
    (event,) = await gated.world.events("version.rejected")
    assert event["reason"].startswith("it is worse: mean reward -0.500")
    assert (event["rolled_back"], event["sessions_left_out"]) == ([2], 40)
    assert (await gated.world.session_row(bad[0])).training == "excluded"
    assert await gated.commit(0) == 3, "and the trainer goes on from the version that serves"


async def test_decisions_survive_the_keeper_and_two_keepers_make_each_once(gated: Gated) -> None:
    world = gated.world
    await gated.commit(0)
    await gated.tend()
    await gated.sessions(0, GOOD * 15)
    await gated.sessions(1, BAD * 10)
    # Another proxy, or this one after its restart: nothing is in memory.
    other = GateKeeper(database=world.database, runs=world.runs, signals=world.signals, clock=world.clock)
    await other.tend()
    await gated.tend()
    assert await gated.states() == ["serving", "rejected"]
    assert len(await world.events("version.rejected")) == 1


async def test_the_trainer_waits_for_a_candidate_if_it_trains_from_passed_ones(gated: Gated) -> None:
    from tests.proxy.turns.trainer_client import open_trainer

    await gated.configure({**CANARY, "train_from": "passed"})
    async with open_trainer(gated.world) as trainer:
        await gated.commit(0)
        await gated.world.ready()
        assert (await trainer.claim()).claim_id is None
        decision = Decision(reason="looks good", by="key_1")
        standing = await steering_of(gated.world).promote(await gated.world.current_run(), 1, decision)
        assert (standing.head, standing.wanted, standing.promoted) == (1, 1, 1)
        assert (await trainer.claim()).claim_id is not None


async def test_bounds_on_metrics_refuse_a_version_before_any_session_sees_it(gated: Gated) -> None:
    await gated.configure({**CANARY, "bounds": {"kl_behaviour_max": 0.1, "entropy_min": 0.2}})
    await gated.commit(0, kl_behaviour=0.3, entropy=0.5)
    await gated.tend()
    assert await gated.states() == ["serving", "rejected"]
    (event,) = await gated.world.events("version.rejected")
    assert event["reason"] == "kl_behaviour is 0.3, and bounds.kl_behaviour_max is 0.1"
    await gated.commit(0, kl_behaviour=0.05, entropy=0.5)
    await gated.tend()
    assert (await gated.states())[-1] == "canary"


async def test_an_evaluation_is_waited_for_and_stops_what_the_reward_does_not_show(gated: Gated) -> None:
    await gated.configure({"policy": "gated", "evaluation": {"suite": "held-out", "tasks": 30}})
    run = await gated.world.current_run()

    async def post(version: int, reward: float) -> None:
        results = [{"task": f"t{task}", "attempt": 0, "reward": reward, "session_id": None} for task in range(30)]
        await gated.gates.add_results(run, version, "held-out", results)

    await gated.commit(0)
    await gated.tend()
    assert "waits for results of the suite 'held-out': 30 tasks" in (await gated.finding(1, "evaluation")).text
    await post(0, 0.6)
    await post(1, 0.7)
    await gated.tend()
    assert await gated.serve() == 1
    await gated.commit(1)
    await post(2, 0.1)
    await gated.tend()
    assert await gated.states() == ["retired", "serving", "rejected"]
    assert (await gated.finding(2, "evaluation")).evidence["worse"] == 30


@pytest.mark.parametrize(("rule", "state"), [("reject", "rejected"), ("promote", "committed")])
async def test_a_candidate_that_nobody_decides_times_out_by_the_rule(gated: Gated, rule: str, state: str) -> None:
    await gated.configure({**CANARY, "timeout_seconds": 60, "on_timeout": rule})
    await gated.commit(0)
    await gated.tend()
    gated.world.clock.now += 61
    await gated.tend()
    assert await gated.states() == ["serving", state]
    (event,) = await gated.world.events("version.rejected" if rule == "reject" else "version.promoted")
    assert event["reason"].startswith("not decided within 60 s (release.timeout_seconds)")


async def test_under_manual_a_version_waits_until_somebody_promotes_it(gated: Gated) -> None:
    await gated.configure({"policy": "manual"})
    await gated.commit(0)
    await gated.tend()
    assert (await gated.states(), await gated.serve()) == (["serving", "candidate"], 0)
    run, steering = await gated.world.current_run(), steering_of(gated.world)
    await steering.promote(run, 1, Decision(reason="fine", by="key_1"))
    assert await gated.serve() == 1
    await gated.configure({"policy": "immediate"})
    await gated.tend()
    await gated.commit(1)
    assert await gated.serve() == 2


async def test_a_served_version_that_turned_bad_is_taken_back(gated: Gated) -> None:
    await gated.configure({"policy": "immediate", "rollback": {"max_drop": 0.1}})
    for parent in range(3):
        await gated.sessions(await gated.serve(), GOOD * 16)
        await gated.commit(parent)
    # The third version is poisoned, and is replaced by others made from it before it has many sessions.
    for parent in range(3, 6):
        await gated.sessions(await gated.serve(), BAD * 10)
        await gated.tend()
        if await gated.world.events("version.rolled_back"):
            break
        await gated.commit(parent)
    (event,) = await gated.world.events("version.rolled_back")
    assert (event["to"], event["suspect"], event["by"]) == (2, 3, "gates")
    assert "surely by more than 0.1 (rollback.max_drop)" in event["reason"]
    assert event["evidence"]["error_rate"] == pytest.approx(0.05 / 200 / 2), "200 versions, rewards and guards"
    assert (await gated.head(), await gated.serve()) == (2, 2)
    assert (await gated.finding(3, "watch")).state == "failed"
    health = HealthCheck(database=gated.world.database, clock=gated.world.clock, engines=None, data_dir=None)
    (problem,) = [each for each in (await health.check()).problems if "rolled back" in each]
    assert problem.startswith("the run 'policy' was rolled back from version 3 to 2: the mean reward fell by")
    await gated.tend()
    assert len(await gated.world.events("version.rolled_back")) == 1


async def test_after_a_gradual_fall_the_run_goes_back_to_before_its_start(gated: Gated) -> None:
    await gated.configure({"policy": "immediate", "rollback": {"max_drop": 0.1}})
    for parent, rewards in enumerate([GOOD * 20, GOOD * 20, [1.0, 0.0] * 16]):
        await gated.sessions(await gated.serve(), rewards)
        await gated.commit(parent)
    await gated.sessions(await gated.serve(), [0.0] * 60)
    await gated.tend()
    (event,) = await gated.world.events("version.rolled_back")
    assert (event["to"], event["suspect"], event["versions"]) == (1, 2, [2, 3])
    assert event["reason"].endswith(
        "60 sessions of version 3 against 192 of version 0 to 2; it has fallen since version 2"
    )
    assert await gated.serve() == 1


async def test_a_canary_of_a_small_share_is_found_among_many_sessions(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.gates.keeper.MOST_SESSIONS", 20)
    await gated.commit(0)
    await gated.tend()
    await gated.sessions(1, GOOD * 3)
    await gated.sessions(0, GOOD * 15)
    await gated.tend()
    evidence = (await gated.finding(1, "canary")).evidence
    assert (evidence["new"]["sessions"], evidence["old"]["sessions"]) == (12, 60), "canary.sessions is 60"


async def test_a_guard_takes_back_what_the_reward_does_not_show(gated: Gated) -> None:
    await gated.configure({"policy": "immediate", "rollback": {"max_drop": 0.5}})
    await gated.sessions(await gated.serve(), GOOD * 15)
    await gated.commit(0)
    await gated.serve()
    await gated.sessions(1, [1.0] * 40, state=TurnState.FAILED)
    await gated.tend()
    (event,) = await gated.world.events("version.rolled_back")
    assert event["reason"].startswith("share of failed calls rose from 0.000 to 1.000, surely by more than 0.1")


async def test_a_pinned_run_is_not_taken_back(gated: Gated) -> None:
    await gated.configure({"policy": "immediate", "rollback": {"max_drop": 0.1}})
    await gated.sessions(await gated.serve(), GOOD * 8)
    await gated.commit(0)
    await gated.serve()
    await steering_of(gated.world).pin(await gated.world.current_run(), 1, Decision(reason="demo", by="key_1"))
    await gated.sessions(1, BAD * 20)
    await gated.tend()
    assert await gated.world.events("version.rolled_back") == []


def test_a_gated_run_needs_a_gate() -> None:
    with pytest.raises(ValueError, match="policy = 'gated' needs a gate"):
        ReleaseSettings(policy="gated")
