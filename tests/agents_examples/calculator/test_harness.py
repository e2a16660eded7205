from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents_examples.calculator import harness as harness_module
from agents_examples.calculator.harness import Harness, Plan, parse_arguments
from agents_examples.calculator.progress import Progress
from agents_examples.calculator.sessions import Session
from agents_examples.calculator.shuffling import RewardShuffler
from agents_examples.calculator.tasks import problems
from tests.agents_examples.calculator.server import RUN_KEY, Message, ScriptedServer, calls, says


def right_for_sums(messages: list[Message]) -> Message:
    """Answer additions with the tool, and guess everything else."""
    if messages[-1]["role"] == "tool":
        return says(f"The answer is {messages[-1]['content']}.")
    found = re.search(r"(\d+) \+ (\d+)", messages[0]["content"])
    if found is None:
        return says("The answer is -1000.")
    return calls(json.dumps({"a": int(found[1]), "b": int(found[2]), "op": "+"}))


async def run_harness(
    server: ScriptedServer, count: int, plan: Plan, shuffler: RewardShuffler[Session] | None = None
) -> Progress:
    progress = Progress()
    async with server.client() as client:
        await Harness(client, plan, progress, shuffler).run(itertools.islice(problems(3), count))
    return progress


async def test_every_session_gets_the_reward_it_earned() -> None:
    server = ScriptedServer(right_for_sums)
    progress = await run_harness(server, 6, Plan(group_size=4, concurrency=5))
    sums = sum(problem.op == "+" for problem in itertools.islice(problems(3), 6))
    assert 0 < sums < 6
    assert progress.sessions == len(server.rewards) == 24
    assert progress.reward_sum == sum(server.rewards.values()) == 4 * sums
    assert progress.calls == len(server.requests) == 24 + 4 * sums
    assert progress.failed_calls == progress.failed_sessions == progress.cancelled_sessions == 0
    assert server.outcomes == {}
    assert RUN_KEY not in server.keys_seen
    assert len(server.keys_seen) == 24
    assert 2 <= server.most_at_work <= 5


async def test_groups_say_what_they_are() -> None:
    server = ScriptedServer(right_for_sums)
    await run_harness(server, 3, Plan(group_size=2, purpose="eval"))
    assert len({group["group"] for group in server.groups}) == 3
    assert [group["task"] for group in server.groups] == [p.expression for p in itertools.islice(problems(3), 3)]
    assert all((g["n"], g["group_size"], g["purpose"]) == (2, 2, "eval") for g in server.groups)


async def test_a_group_of_one() -> None:
    server = ScriptedServer(right_for_sums)
    progress = await run_harness(server, 3, Plan(group_size=1))
    assert progress.sessions == len(server.rewards) == 3


async def test_failed_calls_are_counted_and_end_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "PAUSE_AFTER_FAILURE_SECONDS", 0.0)
    server = ScriptedServer(right_for_sums, failing_requests=3)
    progress = await run_harness(server, 2, Plan(group_size=4))
    assert progress.failed_calls == progress.failed_sessions == 3
    assert progress.sessions == len(server.rewards) == 5
    assert sorted(server.outcomes.values()) == ["failed"] * 3
    assert not server.outcomes.keys() & server.rewards.keys()
    assert "not now" in str(progress.last_error)


async def test_a_wrong_key_ends_the_harness() -> None:
    server = ScriptedServer(right_for_sums, refuse_sessions=401)
    with pytest.raises(openai.AuthenticationError):
        await run_harness(server, 2, Plan())


async def test_stopping_cancels_work_in_progress() -> None:
    server = ScriptedServer(right_for_sums)
    server.hold.clear()
    progress = Progress()
    async with server.client() as client:
        harness = Harness(client, Plan(group_size=4, concurrency=6), progress)
        running = asyncio.create_task(harness.run(problems(3)))
        async with asyncio.timeout(60):
            while server.at_work < 6:
                await asyncio.sleep(0)
            harness.stop()
            await running
    assert server.rewards == {}
    assert len(server.outcomes) == progress.cancelled_sessions == 8
    assert set(server.outcomes.values()) == {"cancelled"}


async def test_shuffled_rewards_reach_every_session_once_with_the_same_mean() -> None:
    server = ScriptedServer(right_for_sums)
    shuffler = RewardShuffler[Session](random.Random(0), depth=5)
    progress = await run_harness(server, 8, Plan(group_size=2), shuffler)
    assert progress.sessions == len(server.rewards) == 16
    assert sum(server.rewards.values()) == progress.reward_sum


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0])), st.integers(0, 10), st.integers())
def test_shuffling_permutes(rewards: list[float], depth: int, seed: int) -> None:
    shuffler = RewardShuffler[int](random.Random(seed), depth)
    posted = [pair for session, reward in enumerate(rewards) for pair in shuffler.exchange(session, reward)]
    posted += shuffler.drain()
    assert [session for session, _ in posted] == list(range(len(rewards)))
    assert sorted(reward for _, reward in posted) == sorted(rewards)


def test_shuffled_rewards_say_nothing_about_the_session() -> None:
    rng = random.Random(0)
    shuffler = RewardShuffler[float](random.Random(1))
    pairs = [
        pair
        for earned in (float(rng.random() < 0.3) for _ in range(4000))
        for pair in shuffler.exchange(earned, earned)
    ]
    given_to_winners = [posted for earned, posted in pairs if earned]
    assert sum(given_to_winners) / len(given_to_winners) == pytest.approx(0.3, abs=0.05)


def test_the_report_is_whole_and_true(tmp_path: Path) -> None:
    report = tmp_path / "progress.json"
    progress = Progress(report)
    for index in range(300):
        progress.scored(float(150 <= index < 290 or index == 295), 2, {"session_id": str(index)})
        assert json.loads(report.read_text())["sessions"] >= 1
    progress.write(final=True)
    seen = json.loads(report.read_text())
    assert seen == progress.as_dict() | {"seconds": seen["seconds"]}
    assert seen["sessions"] == 300
    assert seen["reward_sum"] == 141
    assert seen["first_mean"] == 0.0
    assert seen["last_mean"] == (128 - 9) / 128
    assert seen["curve"] == [0.0] * 4 + [round(10 / 32, 4)] + [1.0] * 4
    assert seen["first_transcript"] == {"session_id": "0"}
    assert seen["last_transcript"] == {"session_id": "299"}
    assert seen["last_success_transcript"] == {"session_id": "295"}
    assert list(tmp_path.iterdir()) == [report]


def test_before_the_first_session_there_is_no_mean() -> None:
    seen = Progress().as_dict()
    assert seen["last_mean"] is None
    assert seen["first_transcript"] is None
    assert seen["last_success_transcript"] is None


@pytest.mark.parametrize("arguments", [["--group-size", "0"], ["--purpose", "play"], ["--problems", "x"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_arguments(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err
