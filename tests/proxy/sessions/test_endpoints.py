from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.auth.service import PrincipalKind
from tests.proxy.domain_client import DomainClient


async def test_one_session(domain: DomainClient) -> None:
    answer = await domain.http.post("/v1/sessions", json={"task": "2+2", "purpose": "eval", "metadata": {"a": [1]}})
    assert answer.status_code == 201
    created = answer.json()
    assert set(created) == {"id", "api_key", "base_url"}
    assert created["base_url"] == "http://proxy.test/v1"
    seen = await domain.http.get(
        f"/v1/sessions/{created['id']}", headers={"authorization": f"Bearer {created['api_key']}"}
    )
    assert seen.status_code == 200
    view = seen.json()
    assert (view["task"], view["purpose"], view["metadata"], view["training"]) == (
        "2+2",
        "eval",
        {"a": [1]},
        "excluded",
    )
    assert view["explanation"] == "Its purpose is eval: recorded and scored, never trained."
    assert (view["turns"], view["rewards"]) == ([], [])


async def test_a_whole_group(domain: DomainClient) -> None:
    created = (await domain.http.post("/v1/sessions", json={"n": 8, "task": "t"})).json()["sessions"]
    assert len(created) == 8
    assert len({session["group_id"] for session in created}) == 1
    view = (await domain.http.get(f"/v1/sessions/{created[3]['id']}")).json()
    assert view["group_id"] == created[0]["group_id"]


async def test_a_named_group(domain: DomainClient) -> None:
    created = (await domain.http.post("/v1/sessions", json={"group": "g", "group_size": 2})).json()
    view = (await domain.http.get(f"/v1/sessions/{created['id']}")).json()
    assert (view["group"], view["group_id"]) == ("g", created["group_id"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 1025}, "n"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"task": 3}, "task"),
        ({"group": ""}, "group"),
        ({"group": "a\nb"}, "group"),
        ({"group_size": 4}, "group_size"),
        ({"n": 5, "group_size": 4}, "n"),
        ({"purpose": "test"}, "purpose"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"a": "x" * 70_000}}, "metadata"),
        ({"metadata": {"a": float("nan")}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": "60"}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"unknown": 1}, "unknown"),
        ([], None),
    ],
)
async def test_wrong_bodies_name_the_field(domain: DomainClient, body: Any, param: str | None) -> None:
    answer = await domain.http.post("/v1/sessions", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (str(error["param"]).split(".")[0], error["type"]) == (str(param), "invalid_request_error"), error


async def test_keys(domain: DomainClient) -> None:
    created = (await domain.http.post("/v1/sessions")).json()
    path = f"/v1/sessions/{created['id']}"
    trainer = await domain.store.credentials.create(PrincipalKind.TRAINER, run_id=domain.store.run.id)
    for headers, status, code in (
        ({"authorization": ""}, 401, "invalid_api_key"),
        ({"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"authorization": f"Bearer {trainer.text}"}, 403, "permission_denied"),
    ):
        for method, target in (("GET", path), ("POST", f"{path}/end"), ("POST", "/v1/sessions")):
            answer = await domain.http.request(method, target, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    for headers in (
        {"authorization": "", "x-api-key": created["api_key"]},
        {"authorization": f"bearer {created['api_key']}"},
    ):
        assert (await domain.http.get(path, headers=headers)).status_code == 200
    own = {"authorization": f"Bearer {created['api_key']}"}
    assert (await domain.http.post("/v1/sessions", headers=own)).status_code == 403


async def test_ending(domain: DomainClient) -> None:
    created = (await domain.http.post("/v1/sessions")).json()
    path = f"/v1/sessions/{created['id']}/end"
    wrong = await domain.http.post(path, json={"outcome": "great"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "outcome")
    ended = await domain.http.post(path, json={"outcome": "failed"})
    assert (ended.status_code, ended.json()["state"], ended.json()["outcome"]) == (200, "ended", "failed")
    again = await domain.http.post(path)
    assert (again.status_code, again.json()["outcome"]) == (200, "failed")
    assert (await domain.http.post("/v1/sessions/unknown/end")).status_code == 404
