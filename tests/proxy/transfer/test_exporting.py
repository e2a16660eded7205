"""Exports in the background: written once, whole, to a directory or an object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from proxy.auth.service import PrincipalKind
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.job_kinds import export_kind
from proxy.jobs.kinds import JobKinds
from proxy.jobs.leasing import find_due
from proxy.jobs.running import JobRunner
from proxy.transfer import endpoints
from proxy.transfer.exporting import BackgroundExports, ExportView
from proxy.transfer.parquet import read_records
from proxy.transfer.reading import ExportFilter
from proxy.transfer.records import SessionRecord, decode
from proxy.transfer.streaming import ExportFormat
from tests.object_store import URL, ObjectServer, object_server
from tests.proxy.store import Store, open_store
from tests.proxy.transfer.test_service import exported, recorded
from tests.proxy.turns.world import World
from tests.running_app import bearer

pytest.importorskip("pyarrow")


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server(monkeypatch) as server:
        yield server


PATH = "/api/v1/runs/policy/exports"


class Exports:
    """An API with exports, whose jobs run when a test says so."""

    def __init__(self, store: Store, directory: Path, store_url: str | None) -> None:
        self.store = store
        self.world = World(store.database, store.clock, store.run)
        self.directory = directory
        self.service = BackgroundExports(
            database=store.database,
            runs=store.runs,
            signals=store.signals,
            clock=store.clock,
            directory=directory,
            store_url=store_url,
        )
        self.kinds = JobKinds([export_kind(self.service)])
        self.runner = JobRunner(
            store.database, self.kinds, store.signals, store.clock, worker="one", concurrency=8, lease_seconds=30
        )

    async def begin(self) -> ExportView:
        """Begin an export `a` of all sessions."""
        return await self.service.begin(self.store.run, "a", ExportFormat.JSONL, ExportFilter())

    async def run_jobs(self) -> list[str]:
        """Run the jobs that are due, once, and return how they ended."""
        found = await self.store.database.read(
            lambda connection: find_due(connection, self.kinds, before=self.store.clock(), want=9, last_runs={})
        )
        leases = await self.runner.lease(found)
        return [end.value for end in await asyncio.gather(*(self.runner.start(lease) for lease in leases))]

    def app(self) -> FastAPI:
        app = FastAPI()
        provide(app, self.store.credentials, self.store.runs, self.service)
        errors.install(app)
        add_routes(app, endpoints.router)
        return app

    @asynccontextmanager
    async def client(self, kind: PrincipalKind = PrincipalKind.ADMIN) -> AsyncIterator[httpx.AsyncClient]:
        run_id = None if kind is PrincipalKind.ADMIN else self.store.run.id
        key = (await self.store.credentials.create(kind, run_id=run_id)).text
        transport = httpx.ASGITransport(app=self.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=bearer(key)) as client:
            yield client


def lines_of(file: Path) -> list[SessionRecord]:
    return [decode(line) for line in file.read_bytes().splitlines()]


@asynccontextmanager
async def opened(url: str, directory: Path, store_url: str | None = None) -> AsyncIterator[Exports]:
    async with open_store(url) as store:
        yield Exports(store, directory / "exports", store_url)


async def test_a_job_writes_the_sessions_to_a_file(database_url: str, tmp_path: Path) -> None:
    async with opened(database_url, tmp_path) as exports, exports.client() as client:
        for _ in range(20):
            await recorded(exports.world)
        for name, format_ in (("june", "jsonl"), ("june.2", "parquet")):
            begun = await client.post(PATH, json={"name": name, "format": format_})
            assert (begun.status_code, begun.json()["state"], begun.json()["address"]) == (202, "waiting", None)
        assert await exports.run_jobs() == ["done", "done"]
        wanted = await exported(exports.world)
        for name, format_ in (("june", "jsonl"), ("june.2", "parquet")):
            view = (await client.get(f"{PATH}/{name}")).json()
            file = Path(view["address"])
            assert file == exports.directory / exports.store.run.id / f"{name}.{format_}"
            assert (view["state"], view["sessions"], view["bytes"]) == ("done", 20, file.stat().st_size)
            assert file.stat().st_mode & 0o077 == 0, "conversations are private"
            found = list(read_records(file)) if format_ == "parquet" else lines_of(file)
            assert [record.session_id for record in found] == [record.session_id for record in wanted]
        assert len(list(file.parent.iterdir())) == 2


async def test_an_attempt_after_a_kill_writes_the_same_file_and_leaves_nothing_else(
    database_url: str, tmp_path: Path
) -> None:
    async with opened(database_url, tmp_path) as exports:
        for _ in range(2):
            await recorded(exports.world)
        view = await exports.begin()
        folder = exports.directory / exports.store.run.id
        folder.mkdir(parents=True)
        (folder / f".{view.job}-0badcafe.part").write_bytes(b"half a li")
        assert await exports.run_jobs() == ["done"]
        (file,) = folder.iterdir()
        assert lines_of(file) == await exported(exports.world)


async def test_an_export_goes_to_the_object_store(
    database_url: str, tmp_path: Path, object_store: ObjectServer
) -> None:
    async with opened(database_url, tmp_path, f"{URL}/exports") as exports:
        await recorded(exports.world)
        await exports.begin()
        assert await exports.run_jobs() == ["done"]
        view = await exports.service.show(exports.store.run, "a")
        key = f"{exports.store.run.id}/a.jsonl"
        assert view.address == f"{URL}/exports/{key}"
        assert ("PUT", f"/weights/site/exports/{key}", "") in object_store.requests
        assert list((exports.directory / exports.store.run.id).iterdir()) == []


async def test_requests_that_cannot_be_met_are_refused(database_url: str, tmp_path: Path) -> None:
    async with opened(database_url, tmp_path) as exports:
        async with exports.client() as client:
            bad: list[dict[str, Any]] = [
                {},
                {"name": "../up"},
                {"name": "a", "format": "xml"},
                {"name": "a", "to": "/"},
            ]
            for body in bad:
                assert (await client.post(PATH, json=body)).status_code == 400, body
            assert (await client.get(f"{PATH}/a")).status_code == 404
            assert (await client.post(PATH, json={"name": "a"})).status_code == 202
            again = await client.post(PATH, json={"name": "a"})
            assert (again.status_code, again.json()["error"]["param"]) == (409, "name")
        async with exports.client(PrincipalKind.RUN) as client:
            assert (await client.post(PATH, json={"name": "b"})).status_code == 403


async def test_an_export_that_cannot_be_written_is_tried_again_and_says_why(
    database_url: str, tmp_path: Path
) -> None:
    async with opened(database_url, tmp_path) as exports:
        exports.directory.write_text("a file where the directory should be")
        await exports.begin()
        assert await exports.run_jobs() == ["failed"]
        view = await exports.service.show(exports.store.run, "a")
        assert (view.state, view.address) == ("failed", None)
        assert "exports" in (view.error or "")
        exports.directory.unlink()
        exports.store.clock.now += 60
        assert await exports.run_jobs() == ["done"]
