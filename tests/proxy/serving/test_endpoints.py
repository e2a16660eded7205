"""Engines as a resource, over HTTP, with one proxy and with two on one store."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from proxy.app import create_app
from proxy.contract.claim import ClaimedBatch, ClaimRequest, decode
from proxy.database.tables import EngineRow
from proxy.database.unit_of_work import Database
from proxy.serving.identity import ProxyIdentity
from proxy.settings import DatabaseSettings, EngineSettings
from tests.fakes.engine import FakeEngine
from tests.proxy.test_app import ADMIN, RUN, settings_for
from tests.proxy.test_loop import trainer_post
from tests.proxy.tokens.models import write_model
from tests.proxy.versions.publishing import commit_request, publish
from tests.running_app import bearer, running

FIRST, SECOND = "http://first.test:1", "http://second.test:1"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Pool:
    """Proxies on one store and their engines by address."""

    def __init__(self, directory: Path, database_url: str, model: Path) -> None:
        self.model = model
        self.engines = {
            url: FakeEngine(lambda _: [40, 41, 2], model_path=str(model), address=url) for url in (FIRST, SECOND)
        }
        self._directory = directory
        self._database = DatabaseSettings(url=database_url)

    @property
    def weights_dir(self) -> Path:
        return self._directory / "data" / "weights"

    async def give_lease(self, owner: str) -> None:
        """Let a proxy that does not run have the lease of the first engine for a minute."""
        database = Database(str(self._database.url))
        lease = update(EngineRow).values(lease_owner=owner, lease_until=time.time() + 60)
        try:
            await database.commit(lambda connection: connection.execute(lease.where(EngineRow.url == FIRST)))
        finally:
            await database.aclose()

    @asynccontextmanager
    async def proxy(self, *, state: str = "ready") -> AsyncIterator[httpx.AsyncClient]:
        """Start a proxy whose configuration has the first engine, and wait until that is in `state`; the client sends
        its admin key."""
        section = EngineSettings(kind=FIRST, url=FIRST, health_interval_seconds=0.05)
        settings = settings_for(self._directory, self.model, engine=section, database=self._database)
        app = create_app(settings, engines=self.engines)
        async with running(app, key=ADMIN) as client:
            await until(lambda: is_in_state(client, "engine", state))
            yield client


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await reached():
            await asyncio.sleep(0.02)


async def listed(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    answer = await client.get("/api/v1/engines")
    assert answer.status_code == 200, answer.text
    return {engine["name"]: engine for engine in answer.json()["engines"]}


async def is_in_state(client: httpx.AsyncClient, name: str, state: str) -> bool:
    engines = await listed(client)
    return name in engines and engines[name]["state"] == state


async def add(client: httpx.AsyncClient, name: str, url: str, **more: str) -> httpx.Response:
    return await client.post("/api/v1/engines", json={"name": name, "url": url, **more})


def message(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.fixture
def pool(tmp_path: Path, database_url: str) -> Pool:
    return Pool(tmp_path, database_url, write_model(tmp_path / "model"))


async def test_an_added_engine_serves_through_every_proxy_until_it_is_drained_and_removed(pool: Pool) -> None:
    async with pool.proxy() as one, pool.proxy() as other:
        added = await add(one, "second", SECOND, run="policy")
        assert added.status_code == 201, added.text
        assert (added.json()["origin"], added.json()["base_model"]) == ("api", str(pool.model))
        await until(lambda: is_in_state(one, "second", "ready"))
        await until(lambda: is_in_state(other, "second", "ready"))
        await until(lambda: reported_by(one, "second", 2))
        # The first engine's only run has another engine now, so it may be drained, through the other proxy.
        draining = await other.post("/api/v1/engines/engine/drain")
        assert draining.json()["state"] in ("draining", "drained"), draining.text
        await until(lambda: is_in_state(one, "engine", "drained"))
        before = len(pool.engines[FIRST].requests)
        for client in (one, other):
            for _ in range(4):
                answer = await client.post("/v1/chat/completions", json=HELLO, headers=bearer(RUN))
                assert answer.status_code == 200, answer.text
        assert len(pool.engines[FIRST].requests) == before, "a drained engine takes no calls of any proxy"
        assert "is in the configuration" in message(await one.delete("/api/v1/engines/engine"), 409)
        refused = message(await other.delete("/api/v1/engines/second"), 409)
        assert "no engine would serve the run 'policy'" in refused
        assert "base-rl engines add" in refused
        assert (await one.post("/api/v1/engines/engine/resume")).json()["desired"] == "serving"
        await until(lambda: is_in_state(other, "engine", "ready"))
        assert "is not drained" in message(await one.delete("/api/v1/engines/second"), 409)
        await one.post("/api/v1/engines/second/drain")
        await until(lambda: is_in_state(one, "second", "drained"))
        assert (await one.delete("/api/v1/engines/second")).status_code == 204
        await until(lambda: is_gone(other, "second"))
        metrics = (await one.get("/metrics")).text
        assert 'base_rl_engine_state{engine="engine",state="ready"} 1.0' in metrics


async def reported_by(client: httpx.AsyncClient, name: str, proxies: int) -> bool:
    found = (await listed(client))[name]
    return bool(found["proxies"] == proxies)


async def is_gone(client: httpx.AsyncClient, name: str) -> bool:
    return name not in await listed(client)


async def test_an_engine_that_does_not_fit_is_refused_with_what_to_do(pool: Pool, tmp_path: Path) -> None:
    other_model = write_model(tmp_path / "other")
    (other_model / "tokenizer.json").write_text((other_model / "tokenizer.json").read_text() + "\n")
    second = pool.engines[SECOND]
    async with pool.proxy() as client:
        assert "choose another name" in message(await add(client, "engine", SECOND), 400)
        assert "has the address" in message(await add(client, "again", FIRST + "/"), 409)
        assert "there is no run" in message(await add(client, "second", SECOND, run="nobody"), 404)
        second.model_path = str(other_model)
        wrong = message(await add(client, "second", SECOND, run="policy"), 400)
        assert "tokenizer.json differs" in wrong
        assert "start it with that model" in wrong
        second.model_path, second.named_adapters, second.down = str(pool.model), True, True
        down = message(await add(client, "second", SECOND, run="policy"), 400)
        assert "wait until it is ready" in down
        second.down = False
        assert (await add(client, "second", SECOND, run="policy")).status_code == 201
        assert "there is an engine called 'second'" in message(await add(client, "second", SECOND), 409)
        assert "there is no engine 'third'" in message(await client.post("/api/v1/engines/third/drain"), 404)


async def test_a_drained_engine_stays_drained_over_a_restart(pool: Pool) -> None:
    async with pool.proxy() as client:
        refused = message(await client.post("/api/v1/engines/engine/drain"), 409)
        assert "no engine would serve the run 'policy'" in refused
        assert (await client.post("/api/v1/engines/engine/drain?force=true")).status_code == 200
        await until(lambda: is_in_state(client, "engine", "drained"))
        answer = await client.post("/v1/chat/completions", json=HELLO, headers=bearer(RUN))
        assert answer.status_code == 503
    async with pool.proxy(state="drained") as client:
        assert (await client.post("/api/v1/engines/engine/resume")).status_code == 200
        await until(lambda: is_in_state(client, "engine", "ready"))
        answer = await client.post("/v1/chat/completions", json=HELLO, headers=bearer(RUN))
        assert answer.status_code == 200, answer.text


async def test_each_engine_loads_a_version_once_however_many_proxies_there_are(pool: Pool) -> None:
    async with pool.proxy() as one, pool.proxy() as other:
        assert (await add(one, "second", SECOND, run="policy")).status_code == 201
        await until(lambda: is_in_state(one, "second", "ready"))
        await until(lambda: is_in_state(other, "second", "ready"))
        weights = await commit_a_version(one, pool)
        for client in (one, other):
            for name in ("engine", "second"):
                await until(partial(serves, client, name, 1))
        for engine in pool.engines.values():
            assert [path for call, (path, _) in loads(engine)] == [weights]
        await until(lambda: is_free(one))


async def test_the_lease_of_a_proxy_that_died_is_taken_over_and_the_engine_resumed(pool: Pool) -> None:
    async with pool.proxy() as client:
        died = ProxyIdentity().name.split("/")
        # A process of this machine that has ended, as after kill -9 in the middle of a load.
        ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await ended.wait()
        died[-2] = str(ended.pid)
        elsewhere = "elsewhere/1/1/0"
        first = pool.engines[FIRST]
        for owner, is_known in ((elsewhere, False), ("/".join(died), True)):
            await pool.give_lease(owner)
            before = len(first.calls)
            if is_known:
                await until(lambda: is_free(client))
                assert ("resume", None) in first.calls[before:]
            else:
                await commit_a_version(client, pool)
                for _ in range(5):
                    await asyncio.sleep(0.05)
                    assert not loads(first), "the other proxy may be loading it"
        await until(partial(serves, client, "engine", 1))


async def is_free(client: httpx.AsyncClient) -> bool:
    return all(engine["lease"] is None for engine in (await listed(client)).values())


async def serves(client: httpx.AsyncClient, name: str, version: int) -> bool:
    return bool((await listed(client))[name]["versions"] == {"policy": version})


def loads(engine: FakeEngine) -> list[Any]:
    return [call for call in engine.calls if call[0] == "load_weights"]


async def commit_a_version(client: httpx.AsyncClient, pool: Pool) -> str:
    """Record and reward a session and commit a version trained on it. Return its directory."""
    session = (await client.post("/v1/sessions", json={}, headers=bearer(RUN))).json()
    own = bearer(session["api_key"])
    assert (await client.post("/v1/chat/completions", json=HELLO, headers=own)).status_code == 200
    await client.post("/v1/feedback", json={"reward": 1}, headers=own)
    batch = decode(await trainer_post(client, "claims", ClaimRequest(trainer="test", want=1)), ClaimedBatch)
    assert batch.claim_id is not None
    weights = publish(pool.weights_dir)
    await trainer_post(client, "versions", commit_request([batch.claim_id], 0, weights))
    return weights.uri
