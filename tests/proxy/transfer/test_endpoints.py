from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from proxy.auth.service import PrincipalKind
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.transfer import endpoints
from proxy.transfer.preferences import decode_preference
from proxy.transfer.records import decode, encode
from proxy.transfer.service import TransferService
from tests.database import sqlite_database
from tests.proxy.store import Store, open_store
from tests.proxy.transfer.test_preferences import preferred
from tests.proxy.transfer.test_service import exported, recorded
from tests.proxy.turns.world import World
from tests.running_app import bearer

parquet: Any = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
async def api(tmp_path: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Store, World]]:
    """The client sends an admin key."""
    async with open_store(sqlite_database(tmp_path)) as store:
        app = FastAPI()
        transfer = TransferService(
            database=store.database,
            clock=store.clock,
            signals=store.signals,
            pseudonyms_of=store.credentials.pseudonyms_of,
        )
        provide(app, store.credentials, store.runs, transfer)
        errors.install(app)
        add_routes(app, endpoints.router)
        key = await store.credentials.create(PrincipalKind.ADMIN)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=bearer(key.text)) as client:
            yield client, store, World(store.database, store.clock, store.run)


async def test_both_formats_stream_the_same_sessions(api: tuple[httpx.AsyncClient, Store, World]) -> None:
    client, _, world = api
    for _ in range(20):
        await recorded(world)
    lines = (await client.get("/api/v1/runs/policy/export")).content.splitlines()
    assert [decode(line) for line in lines] == await exported(world)
    answer = await client.get("/api/v1/runs/policy/export", params={"format": "parquet"})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    rows = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert [row["session_id"] for row in rows] == [decode(line).session_id for line in lines]
    assert rows[0]["turns"][1]["output_ids"] == [8, 9]


async def test_exported_sessions_are_imported(api: tuple[httpx.AsyncClient, Store, World]) -> None:
    client, _, world = api
    line = encode(await recorded(world)).replace(b'"session_id":"ses_', b'"session_id":"old_')
    query = {"train": "true"}
    answer = await client.post("/api/v1/runs/policy/import", params=query, content=line * 2)
    assert answer.json() == {"imported": 1, "skipped": 1, "trainable": 1}
    bad = line + b'{"format": 1}\n'
    answer = await client.post("/api/v1/runs/policy/import", params={"first_line": 40}, content=bad)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "line 41"


async def test_invalid_requests_are_reported(api: tuple[httpx.AsyncClient, Store, World]) -> None:
    client, store, _ = api
    for path, status in (
        ("/api/v1/runs/nowhere/export", 404),
        ("/api/v1/runs/policy/export?format=csv", 400),
        ("/api/v1/runs/policy/export?min_reward=nan", 400),
        ("/api/v1/runs/policy/export?state=gone", 400),
    ):
        assert (await client.get(path)).status_code == status, path
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
    assert (await client.get("/api/v1/runs/policy/export", headers=bearer(key.text))).status_code == 403
    assert (await client.post("/api/v1/runs/policy/import", headers=bearer(key.text))).status_code == 403


async def test_preferences_for_trainers_too(api: tuple[httpx.AsyncClient, Store, World]) -> None:
    client, store, world = api
    one, other = await world.ready(), await world.ready(0.0)
    await preferred(world, one, other)
    path = "/api/v1/runs/policy/export"
    trainer = bearer((await store.credentials.create(PrincipalKind.TRAINER, run_id=store.run.id)).text)
    run = bearer((await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)).text)
    for headers, status in ((trainer, 200), (run, 403)):
        assert (await client.get(f"{path}/preferences", headers=headers)).status_code == status
        assert (await client.get(path, headers=headers)).status_code == status
    lines = (await client.get(f"{path}/preferences", headers=trainer)).content.splitlines()
    assert [decode_preference(line).chosen.session_id for line in lines] == [one]
    named = await client.get(path, params={"session": [other, "ses_nobody"]}, headers=trainer)
    assert [msgspec.json.decode(line)["session_id"] for line in named.content.splitlines()] == [other]
    assert (await client.get(path, params={"task": "none"})).content == b""
    answer = await client.post("/api/v1/runs/policy/import/preferences", content=b"\n".join(lines))
    assert answer.json() == {"imported": 0, "skipped": 1}
    refused = await client.post("/api/v1/runs/policy/import/preferences", headers=trainer, content=b"")
    assert refused.status_code == 403
