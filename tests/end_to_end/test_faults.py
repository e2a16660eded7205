"""kill -9 of every part under load: no answered turn, acknowledged reward or training step is lost or repeated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from tests.end_to_end.installation import Installation, agents_at_work, installation

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

QUESTION = {"role": "user", "content": "What is 12 * 7?"}


def assert_accounts_are_in_order(found: Installation) -> None:
    """Assert that every consumed session is in exactly one committed claim and that versions have no gap."""
    twice = found.ask_store(
        "SELECT session_id, count(*) FROM claimed_sessions JOIN claims ON claims.id = claim_id"
        " WHERE claims.state = 'committed' GROUP BY session_id HAVING count(*) > 1"
    )
    assert twice == []
    lost = found.ask_store(
        "SELECT id FROM sessions WHERE training = 'consumed' AND id NOT IN (SELECT session_id FROM claimed_sessions"
        " JOIN claims ON claims.id = claimed_sessions.claim_id WHERE claims.state = 'committed')"
    )
    assert lost == []
    committed = found.ask_store(
        "SELECT session_id FROM claimed_sessions JOIN claims ON claims.id = claim_id WHERE claims.state = 'committed'"
        " AND session_id NOT IN (SELECT id FROM sessions WHERE training = 'consumed')"
    )
    assert committed == []
    versions = [version for (version,) in found.ask_store("SELECT version FROM policy_versions ORDER BY version")]
    assert versions == list(range(len(versions)))


async def test_a_trainer_killed_during_a_step_loses_and_repeats_nothing(tmp_path: Path) -> None:
    async with installation(tmp_path, lease_seconds=4.0) as found, agents_at_work(found):
        kills = 0
        for _ in range(3):
            await found.until(
                lambda: found.ask_store("SELECT count(*) FROM claims WHERE state = 'leased'")[0][0] > 0,
                what="a claim in the trainer's hands",
            )
            head = found.head()
            found.kill("trainer")
            kills += 1
            await found.until(lambda head=head: found.head() > head, what="a step after the kill")  # type: ignore[misc]
        assert kills == found.stack.supervisor.restarts("trainer")
        await found.until(
            lambda: found.ask_store("SELECT count(*) FROM claims WHERE state = 'expired'")[0][0] >= 1,
            what="the killed trainer's claim gone",
        )
        await found.until(lambda: found.serving() == found.head(), what="the head served")
        assert_accounts_are_in_order(found)


class Customer:
    """A client that calls and rewards one session after another and stores what the proxy acknowledged."""

    def __init__(self, found: Installation) -> None:
        self.turns: list[str] = []
        self.rewards: list[str] = []
        self._found = found

    async def work(self, name: str, *, until: asyncio.Event) -> None:
        number = 0
        found = self._found
        async with (
            found.client() as client,
            AsyncOpenAI(base_url=found.stack.base_url, api_key=found.stack.keys.run_key, max_retries=0) as openai,
        ):
            while not until.is_set():
                number += 1
                session = f"{name}-{number}"
                try:
                    completion = await openai.chat.completions.create(
                        model="calculator",
                        messages=[QUESTION],  # type: ignore[list-item]
                        extra_headers={"X-Base-RL-Session": session},
                    )
                    self.turns.append(completion.id)
                    answer = await client.post("/v1/feedback", json={"turn_id": completion.id, "reward": 1})
                    if answer.status_code == 201:
                        self.rewards += answer.json()["rewards"]
                except (APIConnectionError, APIStatusError, httpx.HTTPError):
                    await asyncio.sleep(0.05)


async def test_a_killed_proxy_loses_no_answered_turn_and_no_acknowledged_reward(tmp_path: Path) -> None:
    async with installation(tmp_path, with_trainer=False) as found:
        customer, over = Customer(found), asyncio.Event()
        workers = [asyncio.create_task(customer.work(f"worker{index}", until=over)) for index in range(16)]
        for round_ in range(1, 4):
            await found.until(lambda r=round_: len(customer.rewards) >= 100 * r, what="100 more rewards")  # type: ignore[misc]
            found.kill("proxy")
            await found.until(
                lambda r=round_: found.stack.supervisor.restarts("proxy") == r,  # type: ignore[misc]
                what="the proxy started again",
            )
            await found.until_ready()
        over.set()
        await asyncio.gather(*workers)

        stored_turns = {turn for (turn,) in found.ask_store("SELECT id FROM turns")}
        assert set(customer.turns) <= stored_turns
        stored_rewards = {reward for (reward,) in found.ask_store("SELECT id FROM rewards")}
        assert set(customer.rewards) <= stored_rewards
        assert len(set(customer.turns)) == len(customer.turns) >= 300


async def test_while_the_engine_is_down_calls_get_503_and_afterwards_the_same_proxy_serves_the_same_version(
    tmp_path: Path,
) -> None:
    async with installation(tmp_path) as found:
        async with agents_at_work(found):
            await found.until(lambda: found.serving() >= 1, what="a trained version served")
        await found.until(lambda: found.serving() == found.head(), what="the head served")
        proxy = found.stack.supervisor.pid("proxy")
        found.kill("engine")
        async with found.client() as client:
            body = {"model": "calculator", "messages": [QUESTION]}
            refusal = await client.post("/v1/chat/completions", json=body)
            assert refusal.status_code == 503, refusal.text
            assert int(refusal.headers["retry-after"]) >= 1
            assert refusal.json()["error"]["code"] == "engine_unavailable"
            await found.until_ready()
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["system_fingerprint"] == f"calculator@{found.head()}"
        assert found.stack.supervisor.pid("proxy") == proxy, "the proxy was not restarted"
        spans = found.ask_store("SELECT spans FROM turns WHERE id = ?", answer.json()["id"])[0][0]
        assert {version for version, _, _ in json.loads(spans)} == {found.head()}
