"""Erasure over HTTP, with concurrent model calls and rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from proxy.feedback import endpoints as feedback_endpoints
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.retention import endpoints
from proxy.retention.erasing import EraseService
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import USER, World, open_world
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
async def site(database_url: str, tmp_path: Path, template: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tmp_path, template, url=database_url) as world:
        store = world.store
        erasing = EraseService(store.database, store.runs, store.credentials, store.signals, store.clock)
        provide(world.app, erasing, store.feedback)
        store.signals.erasures.listen(world.calls.forget)
        store.signals.requested_erasures.listen(world.calls.forget_texts)
        add_routes(world.app, endpoints.router, feedback_endpoints.router)
        yield world


async def as_admin(world: World, method: str, path: str, body: Any = None) -> httpx.Response:
    key = await world.store.credentials.create(PrincipalKind.ADMIN)
    return await world.http.request(method, path, json=body, headers=bearer(key.text))


async def test_an_erased_conversation_is_not_continued(site: World) -> None:
    first = await site.post({"user": "ada"})
    session_id = first.headers["x-base-rl-session"]
    said = first.json()["choices"][0]["message"]
    go_on = [USER, said, {"role": "user", "content": "and then?"}]
    second = await site.post({"user": "ada", "messages": go_on})
    assert second.headers["x-base-rl-session"] == session_id
    site.calls.remembered.put(b"read", "what was said", size=13)
    report = await as_admin(site, "POST", "/api/v1/erase", {"user": "ada", "run": "policy"})
    assert site.calls.remembered.get(b"read") is None
    assert (report.status_code, report.json()["erased"], report.json()["turns"]) == (200, 1, 2)
    third = await site.post({"user": "ada", "messages": go_on})
    assert third.status_code == 200
    assert third.headers["x-base-rl-session"] != session_id
    turn = (await site.turns())[-1]
    assert (turn.continuation, turn.parent_id, turn.prefix_tokens) == ("new", None, 0)


async def test_an_answer_is_not_repeated(site: World) -> None:
    headers = {"Idempotency_Key": "k1"}
    first = await site.post({"user": "ada"}, **headers)
    assert (await site.post({"user": "ada"}, **headers)).json()["id"] == first.json()["id"]
    await as_admin(site, "DELETE", f"/api/v1/sessions/{first.headers['x-base-rl-session']}")
    assert (await site.post({"user": "ada"}, **headers)).json()["id"] != first.json()["id"]


async def test_the_session_is_marked_as_erased_and_accepts_nothing_more(site: World) -> None:
    session_id, key = await site.session_key(metadata={"user_id": "ada", "note": "private"})
    assert (await site.http.post("/v1/chat/completions", json=_CALL, headers=bearer(key))).status_code == 200
    report = (await as_admin(site, "DELETE", f"/api/v1/sessions/{session_id}")).json()
    assert report == (await as_admin(site, "POST", "/api/v1/erase", {"user": "ada"})).json() | {"erased": 1}
    view = (await site.http.get(f"/v1/sessions/{session_id}")).json()
    assert (view["erased_reason"], view["metadata"], view["state"]) == ("requested", None, "ended")
    assert view["explanation"] == "It was erased before it was trained."
    assert len(view["turns"]) == 1
    for answer in (
        await site.http.post("/v1/chat/completions", json=_CALL, headers=bearer(key)),
        await site.http.post(f"/sessions/{session_id}/v1/chat/completions", json=_CALL),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "gone")


async def test_errors_are_reported(site: World) -> None:
    assert (await site.http.delete("/api/v1/sessions/x")).status_code == 403
    assert (await site.http.post("/api/v1/erase", json={"user": "ada"})).status_code == 403
    assert (await as_admin(site, "DELETE", "/api/v1/sessions/x")).status_code == 404
    for body in ({}, {"user": "a", "session": "b"}, {"user": ""}, {"users": "a"}, {"user": "a", "dry_run": 1}):
        answer = await as_admin(site, "POST", "/api/v1/erase", body)
        assert answer.status_code == 400, body


_CALL = {"model": "policy", "messages": [USER]}
