"""Two proxies on one PostgreSQL with one engine share sessions, rewards, claims, versions and keys."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.cli.addresses import random_free_port
from proxy.contract.claim import ClaimedBatch, ClaimRequest, CommitReply, CommitRequest, LeaseReply, decode, encode
from proxy.engines.scripted.script import MODEL
from tests.database import assert_whole, needs_postgresql, postgresql_database
from tests.proxy.versions.publishing import commit_request, publish
from tests.running_app import bearer

pytestmark = [
    needs_postgresql,
    pytest.mark.end_to_end,
    pytest.mark.timeout(180),
]

ADMIN, RUN, TRAINER = ("rl-admin-" + "a" * 43, "rl-run-" + "r" * 43, "rl-trainer-" + "t" * 43)
KEY_SECONDS = 5.0
"""Time within which a key revoked by one proxy is refused by the other (docs/operating.md)."""

LATE_SECONDS = 5.0
"""Allowance for a slow machine."""
READY_SECONDS = 90.0
QUESTION = {"role": "user", "content": "What is 12 * 7?"}
AN_HOUR_AHEAD = (
    "import runpy, time; right = time.time; time.time = lambda: right() + 3600;"
    " runpy.run_module('proxy', run_name='__main__', alter_sys=True)"
)
"""The proxy on a machine whose clock is wrong."""


class Pair:
    """Clients of both proxies, with a run key."""

    def __init__(self, clients: list[httpx.AsyncClient], directory: Path) -> None:
        self.clients = clients
        self.directory = directory

    def other(self, number: int) -> httpx.AsyncClient:
        return self.clients[number % 2]

    async def ask(self, number: int, messages: list[Any] | None = None, session: str | None = None) -> httpx.Response:
        body = {"model": "policy", "messages": messages or [QUESTION]}
        headers = {"x-base-rl-session": session} if session is not None else {}
        answer = await self.other(number).post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def session(self, name: str) -> dict[str, Any]:
        found = await self.clients[0].get(f"/v1/sessions/{name}")
        assert found.status_code == 200, found.text
        return dict(found.json())

    async def claim(self, number: int, want: int) -> ClaimedBatch:
        answer = await self._train(number, "claims", ClaimRequest(trainer=f"t{number}", want=want))
        assert answer.status_code == 200, answer.text
        return decode(answer.content, ClaimedBatch)

    async def renew(self, number: int, claim_id: str) -> LeaseReply:
        answer = await self.other(number).post(
            f"/api/v1/runs/policy/claims/{claim_id}/heartbeat", headers=bearer(TRAINER)
        )
        assert answer.status_code == 200, answer.text
        return decode(answer.content, LeaseReply)

    async def commit(self, number: int, request: CommitRequest) -> httpx.Response:
        return await self._train(number, "versions", request)

    async def _train(self, number: int, what: str, message: Any) -> httpx.Response:
        return await self.other(number).post(
            f"/api/v1/runs/policy/{what}", content=encode(message), headers=bearer(TRAINER)
        )


@contextmanager
def process(arguments: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BASE_RL_")}
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, *arguments], env={**kept, **variables}, stdout=output, stderr=output
        )
        try:
            yield started
        finally:
            started.terminate()
            started.wait(30)


@asynccontextmanager
async def open_pair(
    directory: Path, *, second: tuple[str, ...] = ("-m", "proxy"), **settings: str
) -> AsyncIterator[Pair]:
    """Start both proxies at the same moment. They share the data directory, and so the secret that keys are made
    with. `second` are the arguments of the interpreter that runs the second one."""
    with ExitStack() as stack:
        url = stack.enter_context(postgresql_database(migrated=False))
        engine_port, ports = random_free_port("127.0.0.1"), [random_free_port("127.0.0.1") for _ in range(2)]
        scripted = ["-m", "proxy.engines.scripted", "--port", str(engine_port)]
        stack.enter_context(process(scripted, directory / "engine.log"))
        variables = {
            "BASE_RL_SERVER__DATA_DIR": str(directory / "data"),
            "BASE_RL_DATABASE__URL": url,
            "BASE_RL_ENGINE__URL": f"http://127.0.0.1:{engine_port}",
            "BASE_RL_RUN__MODEL": str(MODEL),
            "BASE_RL_BOOTSTRAP__ADMIN_KEY": ADMIN,
            "BASE_RL_BOOTSTRAP__RUN_KEY": RUN,
            "BASE_RL_BOOTSTRAP__TRAINER_KEY": TRAINER,
            **settings,
        }
        proxies = [
            stack.enter_context(
                process(started, directory / f"proxy-{port}.log", **variables, BASE_RL_SERVER__PORT=str(port))
            )
            for started, port in zip((["-m", "proxy"], [*second]), ports, strict=True)
        ]
        async with clients_of(ports) as clients:
            await asyncio.gather(*(until_ready(*each) for each in zip(clients, proxies, strict=True)))
            yield Pair(clients, directory)
        assert_whole(url)


@asynccontextmanager
async def clients_of(ports: list[int]) -> AsyncIterator[list[httpx.AsyncClient]]:
    first, second = (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=bearer(RUN), timeout=60) for port in ports
    )
    async with first, second:
        yield [first, second]


async def until_ready(client: httpx.AsyncClient, proxy: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(READY_SECONDS):
        while proxy.poll() is None:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError(f"the proxy ended with {proxy.returncode}")


async def test_two_proxies_share_one_store(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        await sessions_are_shared_by_name(pair)
        await conversations_go_on_across_proxies(pair)
        await rewards_are_taken_once(pair)
        await what_is_claimed_is_claimed_once_and_committed_once(pair)
        await keys_of_one_are_the_others(pair)


async def test_proxies_whose_clocks_differ_agree_on_leases(tmp_path: Path) -> None:
    """The second proxy ends none of the leases that the first one grants, and its own last as long as any."""
    async with open_pair(tmp_path, second=("-c", AN_HOUR_AHEAD)) as pair:
        for number in range(2):
            await pair.ask(number, session=f"task {number}")
            body = {"session_id": f"task {number}", "reward": 1.0}
            assert (await pair.other(number).post("/v1/feedback", json=body)).status_code == 201
            claimed = await pair.claim(number, want=1)
            assert claimed.claim_id is not None
            assert claimed.lease_expires_at == pytest.approx(time.time() + 120, abs=60)
            # Every request for a claim first ends the leases that have passed.
            assert [(await pair.claim(other, want=1)).claim_id for other in (0, 1)] == [None, None]
            renewed = await pair.renew(number + 1, claimed.claim_id)
            assert renewed.lease_expires_at == pytest.approx(time.time() + 120, abs=60)
            weights = publish(pair.directory / "data" / "weights")
            answer = await pair.commit(number + 1, commit_request([claimed.claim_id], number, weights))
            assert answer.status_code == 200, answer.text
        found = [await pair.session(f"task {number}") for number in range(2)]
        assert [session["training"] for session in found] == ["consumed", "consumed"]


async def test_two_proxies_share_one_limit(tmp_path: Path) -> None:
    """Agents that call both proxies without waiting get no more than one proxy would allow; those that wait are
    served."""
    limits: dict[str, Any] = {
        "BASE_RL_RUN__LIMITS__CALLS_PER_MINUTE": "600",
        "BASE_RL_RUN__LIMITS__BURST_SECONDS": "2",
    }
    body: dict[str, Any] = {"model": "policy", "messages": [QUESTION]}
    async with open_pair(tmp_path, **limits) as pair:
        statuses: list[int] = []
        begun = time.monotonic()

        async def hurry(number: int) -> None:
            while time.monotonic() < begun + 3.0:
                statuses.append((await pair.other(number).post("/v1/chat/completions", json=body)).status_code)

        await asyncio.gather(*(hurry(number) for number in range(8)))
        elapsed = time.monotonic() - begun
        assert set(statuses) == {200, 429}
        assert 18 <= statuses.count(200) <= 10 * (elapsed + 2)

        async with AsyncExitStack() as stack:
            agents = [
                await stack.enter_async_context(
                    openai.AsyncOpenAI(api_key=RUN, base_url=f"{client.base_url}/v1", max_retries=20)
                )
                for client in pair.clients
            ]
            calls = (agents[number % 2].chat.completions.create(**body) for number in range(40))
            turns = {answer.id for answer in await asyncio.gather(*calls)}
        assert len(turns) == 40, "none was taken for the repetition of another"


async def sessions_are_shared_by_name(pair: Pair) -> None:
    """Simultaneous calls with one name, half of them to each proxy, become turns of one session."""
    for attempt in range(5):
        calls = (pair.ask(number, session=f"task {attempt}") for number in range(8))
        answers = await asyncio.gather(*calls)
        assert len({answer.headers["x-base-rl-session"] for answer in answers}) == 1
        found = await pair.session(f"task {attempt}")
        assert sorted(turn["id"] for turn in found["turns"]) == sorted(
            answer.headers["x-base-rl-turn"] for answer in answers
        )


async def conversations_go_on_across_proxies(pair: Pair) -> None:
    messages: list[Any] = [{"role": "user", "content": "a conversation of its own"}]
    sessions = set()
    for number in range(4):
        answer = await pair.ask(number, messages)
        sessions.add(answer.headers["x-base-rl-session"])
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"go on, {number}"}]
    assert len(sessions) == 1
    found = await pair.session(sessions.pop())
    assert [turn["continuation"] for turn in found["turns"]] == ["new", "exact", "exact", "exact"]


async def rewards_are_taken_once(pair: Pair) -> None:
    """One reward sent to both proxies at once with one key becomes one entry, and both return the same answer."""
    for attempt in range(5):
        body = {"session_id": f"task {attempt}", "reward": attempt / 4, "idempotency_key": f"reward {attempt}"}
        receipts = await asyncio.gather(*(pair.other(number).post("/v1/feedback", json=body) for number in range(6)))
        assert [receipt.status_code for receipt in receipts] == [201] * 6, [one.text for one in receipts]
        assert all(receipt.json() == receipts[0].json() for receipt in receipts)
        found = await pair.session(f"task {attempt}")
        assert (len(found["rewards"]), found["state"]) == (1, "ended")


async def what_is_claimed_is_claimed_once_and_committed_once(pair: Pair) -> None:
    batches = await asyncio.gather(*(pair.claim(number, want=2) for number in range(4)))
    handed = [
        trajectory.session_id for batch in batches for group in batch.groups for trajectory in group.trajectories
    ]
    assert len(handed) == len(set(handed)) == 5
    claim_ids = [batch.claim_id for batch in batches if batch.claim_id is not None]
    request = commit_request(claim_ids, 0, publish(pair.directory / "data" / "weights"))
    answers = await asyncio.gather(*(pair.commit(number, request) for number in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    replies = [decode(answer.content, CommitReply) for answer in answers]
    assert [reply.version for reply in replies] == [1] * 4
    assert sorted(reply.repeated for reply in replies) == [False, True, True, True]
    async with asyncio.timeout(30):
        for number in range(2):
            while (await pair.other(number).get("/readyz")).json()["serving_version"] != 1:
                await asyncio.sleep(0.05)
    for number in range(2):
        assert (await pair.ask(number)).json()["system_fingerprint"] == "policy@1"


async def keys_of_one_are_the_others(pair: Pair) -> None:
    made = await pair.clients[0].post("/api/v1/runs/policy/keys", json={}, headers=bearer(ADMIN))
    assert made.status_code == 201, made.text
    key = made.json()
    made_key = bearer(key["key"])
    assert (await pair.clients[1].get("/v1/models", headers=made_key)).status_code == 200
    gone = await pair.clients[0].delete(f"/api/v1/runs/policy/keys/{key['id']}", headers=bearer(ADMIN))
    assert gone.status_code == 204
    assert (await pair.clients[0].get("/v1/models", headers=made_key)).status_code == 401
    async with asyncio.timeout(KEY_SECONDS + LATE_SECONDS):
        while (await pair.clients[1].get("/v1/models", headers=made_key)).status_code == 200:
            await asyncio.sleep(0.1)
