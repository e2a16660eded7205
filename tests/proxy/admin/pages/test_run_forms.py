"""The forms of runs, on a whole proxy."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import Application, create_app
from proxy.settings import BootstrapSettings, DatabaseSettings, RunSettings, ServerSettings, Settings
from tests.database import sqlite_database
from tests.fakes.engine import FakeEngine
from tests.proxy.admin.visiting import OWN
from tests.proxy.tokens.models import write_model
from tests.running_app import running

ADMIN, RUN = "rl-admin-" + "a" * 32, "rl-run-" + "r" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def app(tmp_path: Path, model: Path) -> Application:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        database=DatabaseSettings(url=sqlite_database(tmp_path)),
        bootstrap=BootstrapSettings(admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN)),
        run=RunSettings(name="first", model=str(model)),
    )
    return create_app(settings, engine=FakeEngine(lambda _request: [5, 6, 2], model_path=str(model)))


@pytest.fixture
async def admin(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with running(app) as client:
        await client.post("/admin/login", data={"key": ADMIN}, headers=OWN)
        yield client


async def test_a_run_is_created_changed_and_cloned(app: Application, admin: httpx.AsyncClient, model: Path) -> None:
    form = {
        "name": "second", "model": str(model), "clone": "", "sampling.temperature": "0.7",
        "limits.calls_per_minute": "60", "more": '{"reward_weights": {"format": 0.5}}',
    }  # fmt: skip
    reply = await admin.post("/admin/new-run", data=form, headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin/runs/second")
    settings = (await app.services.runs.by_name("second")).settings
    assert (settings.sampling.temperature, settings.limits.calls_per_minute) == (0.7, 60)

    page = (await admin.get("/admin/runs/second/settings")).text
    assert 'value="0.7"' in page
    assert "&#34;format&#34;: 0.5" in page
    changed = {"weights": "", "sampling.temperature": "0.5", "more": ""}
    assert (await admin.post("/admin/runs/second/settings", data=changed, headers=OWN)).status_code == 303
    settings = (await app.services.runs.by_name("second")).settings
    assert (settings.sampling.temperature, settings.limits.calls_per_minute) == (0.5, None)
    assert settings.reward_weights == {}

    page = (await admin.get("/admin/new-run?clone=second")).text
    assert 'value="second-copy"' in page
    copy = {"name": "third", "clone": "second", "sampling.temperature": "0.5", "max_new_tokens": "64"}
    assert (await admin.post("/admin/new-run", data=copy, headers=OWN)).status_code == 303
    settings = (await app.services.runs.by_name("third")).settings
    assert (settings.sampling.temperature, settings.max_new_tokens) == (0.5, 64)


@pytest.mark.parametrize(
    ("field", "value", "status", "says"),
    [
        ("name", "first", 409, "already"),
        ("name", "no spaces", 400, "pattern"),
        ("model", "/nowhere", 400, "model"),
        ("sampling.temperature", "-1", 400, "greater than 0"),
        ("sampling.mode", "odd", 400, "sampling.mode"),
        ("more", '{"unknown": 1}', 400, "unknown"),
        ("more", "<script>", 400, "not valid JSON"),
    ],
)
async def test_an_error_stands_beside_its_field_and_the_form_keeps_its_values(
    app: Application, admin: httpx.AsyncClient, model: Path, field: str, value: str, status: int, says: str
) -> None:
    form = {"name": "second", "model": str(model), "limits.max_waiting": "7"} | {field: value}
    reply = await admin.post("/admin/new-run", data=form, headers=OWN)
    assert reply.status_code == status
    shown = html.unescape(reply.text.split(f'id="{field}-problem"')[1].split("</p>")[0])
    assert says in shown if field != "sampling.mode" else shown
    assert 'value="7"' in reply.text
    assert "<script>" not in reply.text.replace("<script src", "")
    assert [run.name for run in await app.services.runs.list_()] == ["first"]


async def test_a_run_is_archived_unarchived_and_deleted_by_typing_its_name(
    app: Application, admin: httpx.AsyncClient, model: Path
) -> None:
    await app.services.run_management.create("second", str(model), {})
    for switch, state in (
        ("archive", "archived"),
        ("unarchive", "active"),
        ("pause", "paused"),
        ("resume", "active"),
    ):
        assert (await admin.post(f"/admin/runs/second/{switch}", headers=OWN)).status_code == 303
        assert (await app.services.runs.by_name("second")).state == state
    assert (await admin.post("/admin/runs/second/archive", headers=OWN)).status_code == 303
    assert "Unarchive" in (await admin.get("/admin/runs/second")).text
    assert "cannot be undone" in (await admin.get("/admin/runs/second/delete")).text
    wrong = await admin.post("/admin/runs/second/delete", data={"confirmation": "first"}, headers=OWN)
    assert (wrong.status_code, "type second to confirm" in wrong.text) == (400, True)
    reply = await admin.post("/admin/runs/second/delete", data={"confirmation": "second"}, headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin")
    assert [run.name for run in await app.services.runs.list_()] == ["first"]
    served = await admin.post("/admin/runs/first/delete", data={"confirmation": "first"}, headers=OWN)
    assert served.status_code == 409
    assert "archive" in served.text


async def test_only_our_own_page_and_an_admin_change_runs(
    app: Application, admin: httpx.AsyncClient, model: Path
) -> None:
    paths = ("new-run", "runs/first/settings", "runs/first/delete", "runs/first/archive", "runs/first/pause")
    for path in paths:
        for headers in ({}, {"origin": "https://elsewhere.test"}):
            assert (await admin.post(f"/admin/{path}", headers=headers)).status_code == 403, path
    await admin.post("/admin/login", data={"key": RUN}, headers=OWN)
    for path in paths:
        assert (await admin.post(f"/admin/{path}", headers=OWN)).status_code == 403, path
    for path in paths[:3]:
        assert (await admin.get(f"/admin/{path}")).status_code == 403, path
    page = (await admin.get("/admin/runs/first")).text
    assert "Manage" not in page
    assert [run.name for run in await app.services.runs.list_()] == ["first"]
