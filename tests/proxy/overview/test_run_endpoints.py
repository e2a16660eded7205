"""Runs as a resource, over HTTP, on the whole proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import SecretStr
from sqlalchemy import select

from proxy.app import Application, create_app
from proxy.contract.claim import ClaimRequest
from proxy.database.tables import EventRow
from proxy.settings import BootstrapSettings, DatabaseSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running

ADMIN, RUN, TRAINER = "rl-admin-chosen", "rl-run-chosen", "rl-trainer-chosen"
CALL = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def app(database_url: str, tmp_path: Path, model: Path) -> Application:
    settings = Settings(
        server=ServerSettings(data_dir=tmp_path / "data"),
        database=DatabaseSettings(url=database_url),
        bootstrap=BootstrapSettings(
            admin_key=SecretStr(ADMIN), run_key=SecretStr(RUN), trainer_key=SecretStr(TRAINER)
        ),
        run=RunSettings(name="policy", model=str(model)),
    )
    return create_app(settings, engine=FakeEngine(lambda _request: [5, 6, 2], model_path=str(model)))


@pytest.fixture
async def admin(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with running(app, key=ADMIN) as client:
        yield client


async def events(app: Application, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    rows = await app.services.database.read(
        lambda connection: connection.execute(
            select(EventRow.kind, EventRow.data).where(EventRow.kind.in_(kinds)).order_by(EventRow.id)
        ).all()
    )
    return [(row.kind, row.data) for row in rows]


async def names(client: httpx.AsyncClient, key: str = ADMIN) -> list[str]:
    return [run["name"] for run in (await client.get("/api/v1/runs", headers=bearer(key))).json()["runs"]]


async def key_of(client: httpx.AsyncClient, run: str, kind: str) -> str:
    answer = await client.post("/api/v1/keys", json={"kind": kind, "run": run})
    return str(answer.json()["key"])


async def served(client: httpx.AsyncClient, key: str, **body: Any) -> httpx.Response:
    """Call until the engine's version is known, which is soon after the start."""
    async with asyncio.timeout(10):
        while True:
            answer = await client.post("/v1/chat/completions", json=CALL | body, headers=bearer(key))
            if answer.status_code != 503:
                return answer
            await asyncio.sleep(0.01)


async def test_a_run_is_created_with_defaults(app: Application, admin: httpx.AsyncClient, model: Path) -> None:
    body = {"name": "shop", "model": str(model), "settings": {"lease_seconds": 7, "trainer": {"seed": 1}}}
    created = await admin.post("/api/v1/runs", json=body)
    assert created.status_code == 201
    shop = created.json()
    assert (shop["name"], shop["state"], shop["base_model"]) == ("shop", "active", str(model))
    assert (shop["head_version"], shop["serving_version"]) == (0, 0)
    default = RunSettings().model_dump(mode="json", exclude={"name", "model", "begin_from"})
    assert shop["settings"] == default | {"lease_seconds": 7, "trainer": {"seed": 1}}
    for name in ("shop", shop["id"]):
        assert (await admin.get(f"/api/v1/runs/{name}")).json() == shop
    assert await names(admin) == ["policy", "shop"]
    assert (await events(app, "run.created"))[1][1] == {"name": "shop", "base_model": str(model)}
    key = await key_of(admin, "shop", "run")
    assert await names(admin, key) == ["shop"]
    # No engine serves the new run yet: its agents are told so, and to try again.
    answer = await admin.post("/v1/chat/completions", json=CALL | {"model": "shop"}, headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "shop" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


JUDGES_ITSELF = {"model": "run:x@0", "rubric": "right"}

# Bodies of new runs, and the field that each error names. Models are those of `models_of`.
BAD_RUNS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"name": "x"}, "model"),
    ({"model": "MODEL"}, "name"),
    ({"name": "", "model": "MODEL"}, "name"),
    ({"name": "no spaces", "model": "MODEL"}, "name"),
    ({"name": "a/b", "model": "MODEL"}, "name"),
    ({"name": "x\n", "model": "MODEL"}, "name"),
    ({"name": "x" * 65, "model": "MODEL"}, "name"),
    ({"name": 3, "model": "MODEL"}, "name"),
    ({"name": "x", "model": ""}, "model"),
    ({"name": "x", "from": "policy"}, "from"),
    ({"name": "x", "from": "policy@one"}, "from"),
    ({"name": "x", "from": "policy@999"}, "from"),
    ({"name": "x", "from": "nobody@0"}, "from"),
    ({"name": "x", "from": "policy@0", "model": "EMPTY"}, "from"),
    ({"name": "x", "from": "policy@0", "settings": {"weights": "adapter"}}, "from"),
    ({"name": "x", "model": "MODEL", "settings": {"from": "policy@0"}}, "settings.from"),
    ({"name": "x", "model": "/nowhere/at/all"}, "model"),
    ({"name": "x", "model": "EMPTY"}, "model"),
    ({"name": "x", "model": "NO_TEMPLATE"}, "model"),
    ({"name": "x", "model": "BROKEN_TEMPLATE"}, "model"),
    ({"name": "x", "model": "REFUSING_TEMPLATE"}, "model"),
    ({"name": "x", "model": "~nobody-of-this-name/model"}, "model"),
    ({"name": "x", "model": "null\0byte"}, "model"),
    ({"name": "x", "model": "MODEL", "settings": {"tool_parser": "morse"}}, "model"),
    ({"name": "x", "model": "MODEL", "settings": {"lease_seconds": 0}}, "settings.lease_seconds"),
    ({"name": "x", "model": "MODEL", "settings": {"leese": 1}}, "settings.leese"),
    ({"name": "x", "model": "MODEL", "settings": {"name": "y"}}, "settings.name"),
    ({"name": "x", "model": "MODEL", "settings": {"trainer": 3}}, "settings.trainer"),
    ({"name": "x", "model": "MODEL", "settings": {"trainer": {"seed": 2**70}}}, "settings.trainer"),
    ({"name": "x", "model": "MODEL", "settings": {"limits": {"burst": 3}}}, "settings.limits.burst"),
    ({"name": "x", "model": "MODEL", "settings": {"judges": {"me": JUDGES_ITSELF}}}, "settings.judges"),
    ({"name": "x", "model": "MODEL", "settings": []}, "settings"),
    ({"name": "x", "model": "MODEL", "setings": {}}, "setings"),
)


async def test_a_run_that_could_not_be_called_is_refused_at_its_creation(
    admin: httpx.AsyncClient, model: Path, tmp_path: Path
) -> None:
    models = models_of(tmp_path, model)
    for body, param in BAD_RUNS:
        answer = await admin.post(
            "/api/v1/runs", json=body | ({"model": models[body["model"]]} if body.get("model") in models else {})
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (body, error)
        assert error["message"]
    assert await names(admin) == ["policy"]


def models_of(directory: Path, model: Path) -> dict[str, str]:
    """Return directories of models by name: one that can be served, and four that cannot."""
    (directory / "empty").mkdir()
    return {
        "MODEL": str(model),
        "EMPTY": str(directory / "empty"),
        "NO_TEMPLATE": with_template(directory / "no", model, None),
        "BROKEN_TEMPLATE": with_template(directory / "broken", model, "{% for %}"),
        "REFUSING_TEMPLATE": with_template(directory / "refusing", model, "{{ raise_exception('no') }}"),
    }


def with_template(directory: Path, model: Path, template: str | None) -> str:
    """Copy a model's files, with another chat template or none."""
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json" and file.name != "tokenizer_config.json":
            (directory / file.name).write_bytes(file.read_bytes())
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return str(directory)


async def test_a_name_belongs_to_one_run(admin: httpx.AsyncClient, model: Path) -> None:
    body = {"name": "twice", "model": str(model)}
    answers = await asyncio.gather(*(admin.post("/api/v1/runs", json=body) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    refused = next(answer for answer in answers if answer.status_code == 409).json()["error"]
    assert (refused["param"], "choose another name" in refused["message"]) == ("name", True)
    assert (await admin.post("/api/v1/runs/policy/clone", json={"name": "twice"})).status_code == 409
    assert await names(admin) == ["policy", "twice"]


async def test_settings_are_changed_by_a_merge_patch(app: Application, admin: httpx.AsyncClient, model: Path) -> None:
    settings = {"lease_seconds": 7, "reward_weights": {"style": 0.5, "tests": 2}, "limits": {"max_waiting": 3}}
    await admin.post("/api/v1/runs", json={"name": "shop", "model": str(model), "settings": settings})
    patch = {"lease_seconds": None, "reward_weights": {"style": None, "cost": -1}, "max_new_tokens": 5}
    changed = await admin.patch("/api/v1/runs/shop", json={"settings": patch, "name": "shop", "model": str(model)})
    assert changed.status_code == 200
    after = changed.json()["settings"]
    assert (after["lease_seconds"], after["max_new_tokens"]) == (RunSettings().lease_seconds, 5)
    assert (after["reward_weights"], after["limits"]["max_waiting"]) == ({"tests": 2, "cost": -1}, 3)
    assert (await admin.patch("/api/v1/runs/shop", json={"settings": patch})).json()["settings"] == after
    assert [data for _, data in await events(app, "run.configured")] == [
        {"changed": ["lease_seconds", "max_new_tokens", "reward_weights"]}
    ]


BAD_CHANGES: tuple[tuple[Any, str | None], ...] = (
    ({"model": "another/model"}, "model"),
    ({"name": "other"}, "name"),
    ({"settings": {"weights": "adapter"}}, "settings.weights"),
    ({"settings": {"sampling": {"mode": "wild"}}}, "settings.sampling.mode"),
    ({"settings": {"limits": 3}}, "settings.limits"),
    ({"settings": {"tool_parser": "morse"}}, "model"),
    ({"settings": {"model": "x"}}, "settings.model"),
    ({"settings": None}, "settings"),
    ([], None),
)


async def test_a_wrong_change_changes_nothing(admin: httpx.AsyncClient) -> None:
    before = (await admin.get("/api/v1/runs/policy")).json()["settings"]
    for body, param in BAD_CHANGES:
        answer = await admin.patch("/api/v1/runs/policy", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    assert (await admin.get("/api/v1/runs/policy")).json()["settings"] == before


async def test_changes_at_the_same_time_are_all_made(admin: httpx.AsyncClient) -> None:
    patches = [{"max_new_tokens": 5}, {"lease_seconds": 6.0}, {"reward_weights": {"style": 0.5}}]
    answers = await asyncio.gather(
        *(admin.patch("/api/v1/runs/policy", json={"settings": patch}) for patch in patches)
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    after = (await admin.get("/api/v1/runs/policy")).json()["settings"]
    assert (after["max_new_tokens"], after["lease_seconds"], after["reward_weights"]) == (5, 6.0, {"style": 0.5})


async def test_changed_reward_rules_recombine_rewards_that_nobody_trained(admin: httpx.AsyncClient) -> None:
    session = (await admin.post("/v1/sessions", headers=bearer(RUN))).json()["id"]
    await admin.post("/v1/feedback", json={"session_id": session, "reward": 1, "name": "style"}, headers=bearer(RUN))
    await admin.patch("/api/v1/runs/policy", json={"settings": {"reward_weights": {"style": 0.25}}})
    assert (await admin.get(f"/v1/sessions/{session}")).json()["reward"] == 0.25


async def test_a_clone_has_the_settings_of_its_source_and_none_of_its_data(
    app: Application, admin: httpx.AsyncClient
) -> None:
    await admin.post("/v1/sessions", headers=bearer(RUN))
    await admin.patch("/api/v1/runs/policy", json={"settings": {"lease_seconds": 7, "max_new_tokens": 9}})
    body = {"name": "copy", "settings": {"max_new_tokens": 3, "weights": "adapter"}}
    answer = await admin.post("/api/v1/runs/policy/clone", json=body)
    assert answer.status_code == 201
    copy, policy = answer.json(), (await admin.get("/api/v1/runs/policy")).json()
    assert copy["settings"] == policy["settings"] | {"max_new_tokens": 3, "weights": "adapter"}
    assert (copy["base_model"], copy["head_version"]) == (policy["base_model"], 0)
    for run, sessions in (("policy", 1), ("copy", 0)):
        assert len((await admin.get(f"/api/v1/runs/{run}/sessions")).json()["sessions"]) == sessions
    assert (await events(app, "run.created"))[-1][1]["cloned_from"] == "policy"
    assert (await admin.post("/api/v1/runs/nobody/clone", json={"name": "x"})).status_code == 404


async def test_an_archived_run_keeps_its_data_and_serves_nothing(app: Application, admin: httpx.AsyncClient) -> None:
    assert (await served(admin, RUN)).status_code == 200
    assert [model["id"] for model in (await admin.get("/v1/models", headers=bearer(RUN))).json()["data"]]
    for _ in range(2):  # archiving twice is the same as once
        answer = await admin.post("/api/v1/runs/policy/archive")
        assert (answer.status_code, answer.json()["state"]) == (200, "archived")
    async with asyncio.timeout(5):  # rows of runs are a second old at most
        while (refused := await served(admin, RUN)).status_code == 200:
            await asyncio.sleep(0.05)
    claim = msgspec.msgpack.encode(ClaimRequest(trainer="t", want=1, wait_s=0.0))
    for answer in (
        refused,
        await admin.post("/v1/sessions", headers=bearer(RUN)),
        await admin.get("/api/v1/runs/policy/head", headers=bearer(TRAINER)),
        await admin.post("/api/v1/runs/policy/claims", content=claim, headers=bearer(TRAINER)),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (410, "run_archived")
        assert "base-rl runs unarchive policy" in error["message"]
    for key in (RUN, ADMIN):
        assert (await admin.get("/v1/models", headers=bearer(key))).json()["data"] == []
    for change in ("pause", "resume"):
        assert (await admin.post(f"/api/v1/runs/policy/{change}")).status_code == 409
    sessions = (await admin.get("/api/v1/runs/policy/sessions")).json()["sessions"]
    assert sessions
    assert (await admin.get("/api/v1/runs/policy/claims", headers=bearer(TRAINER))).status_code == 200
    for _ in range(2):
        assert (await admin.post("/api/v1/runs/policy/unarchive")).json()["state"] == "active"
    async with asyncio.timeout(5):
        while (await served(admin, RUN)).status_code != 200:
            await asyncio.sleep(0.05)
    kinds = [kind for kind, _ in await events(app, "run.archived", "run.unarchived", "run.paused", "run.resumed")]
    assert kinds == ["run.archived", "run.unarchived"]


async def test_unarchiving_does_not_resume_a_run_that_is_only_paused(admin: httpx.AsyncClient) -> None:
    await admin.post("/api/v1/runs/policy/pause")
    assert (await admin.post("/api/v1/runs/policy/unarchive")).json()["state"] == "paused"


async def test_a_run_with_data_is_archived_and_named_again_before_it_is_deleted(
    app: Application, admin: httpx.AsyncClient, model: Path
) -> None:
    for name in ("empty", "used"):
        await admin.post("/api/v1/runs", json={"name": name, "model": str(model)})
    await admin.post("/v1/sessions", headers=bearer(await key_of(admin, "used", "run")))
    refused = await admin.delete("/api/v1/runs/used")
    assert (refused.status_code, "base-rl runs archive used" in refused.json()["error"]["message"]) == (409, True)
    assert (await admin.delete("/api/v1/runs/policy")).status_code == 409
    assert (await admin.delete("/api/v1/runs/empty")).status_code == 204
    assert (await admin.delete("/api/v1/runs/empty")).status_code == 404
    assert await names(admin) == ["policy", "used"]
    assert (await admin.post("/api/v1/runs/used/archive")).status_code == 200
    for confirm in ({}, {"confirm": "policy"}):
        refused = await admin.delete("/api/v1/runs/used", params=confirm)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "confirm")
        assert "1 sessions" in refused.json()["error"]["message"]
    assert (await admin.delete("/api/v1/runs/used?confirm=used")).status_code == 204
    assert await names(admin) == ["policy"]
    deleted = [data for _, data in await events(app, "run.deleted")]
    assert [(data["name"], data["sessions"]) for data in deleted] == [("empty", 0), ("used", 1)]
    assert (await admin.post("/api/v1/runs", json={"name": "used", "model": str(model)})).status_code == 201


async def test_only_an_admin_key_manages_runs(admin: httpx.AsyncClient, model: Path) -> None:
    for method, path, body in (
        ("POST", "/api/v1/runs", {"name": "x", "model": str(model)}),
        ("PATCH", "/api/v1/runs/policy", {"settings": {}}),
        ("POST", "/api/v1/runs/policy/clone", {"name": "x"}),
        ("POST", "/api/v1/runs/policy/archive", None),
        ("POST", "/api/v1/runs/policy/unarchive", None),
        ("POST", "/api/v1/runs/policy/resume", None),
        ("DELETE", "/api/v1/runs/policy", None),
    ):
        for key in (RUN, TRAINER):
            answer = await admin.request(method, path, json=body, headers=bearer(key))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied"), path
