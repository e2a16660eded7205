from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from proxy.lifecycle.events import append_event
from proxy.overview.filters import SessionFilter
from tests.fakes.run_history import NOW, add_run
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import Site

READABLE = [
    "/api/v1/runs/calculator",
    "/api/v1/runs/calculator/sessions",
    "/api/v1/runs/calculator/rewards",
    "/api/v1/runs/calculator/rewards/revised",
    "/api/v1/rewards?run=calculator",
    "/api/v1/runs/calculator/steps",
    "/api/v1/runs/calculator/steps/1",
    "/api/v1/runs/calculator/curves",
]


async def _session_id(site: Site, run_id: str) -> str:
    return (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions[0].id


async def test_the_answers_that_the_command_line_reads(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    reply = await site.client.get("/api/v1/runs", headers=admin)
    assert reply.headers["cache-control"] == "no-store"
    (run,) = reply.json()["runs"]
    assert {
        "id", "name", "state", "base_model", "created_at", "head_version", "serving_version", "sessions",
        "session_count", "open_sessions", "turn_count", "swaps", "mean_reward", "reward_count", "staleness_mean",
        "staleness_max", "tokens_per_second", "late_rewards", "revised_sessions", "inexact_share",
        "unattributed_share", "cut_share",
        "last_activity_at", "not_learnt_because", "begun_from", "project",
    } == set(run)  # fmt: skip
    assert run["name"] == "calculator"
    steps = (await site.client.get("/api/v1/runs/calculator/steps", headers=admin)).json()
    assert steps["steps"][0]["version"] == 6
    assert steps["next_cursor"] is None
    health = (await site.client.get("/api/v1/health", headers=admin)).json()
    assert health["ready"] is True
    assert health["runs"][0]["trainer"] == "active"


@pytest.mark.parametrize("path", READABLE)
async def test_a_run_key_reads_its_run_and_no_other(site: Site, run_id: str, path: str) -> None:
    other_id = await add_run(site.database, name="other")
    own = await site.key(PrincipalKind.RUN, run_id)
    other = await site.key(PrincipalKind.RUN, other_id)
    assert (await site.client.get(path, headers=own)).status_code == 200
    refused = await site.client.get(path, headers=other)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    assert (await site.client.get(path)).status_code == 401


async def test_a_run_key_sees_sessions_and_turns_of_its_run_only(site: Site, run_id: str) -> None:
    other = await site.key(PrincipalKind.RUN, await add_run(site.database, name="other"))
    own = await site.key(PrincipalKind.RUN, run_id)
    session_id = await _session_id(site, run_id)
    session = (await site.client.get(f"/api/v1/sessions/{session_id}", headers=own)).json()
    turn_id = session["turns"][0]["id"]
    assert session["turns"][0]["tokens"] is None
    turn = (await site.client.get(f"/api/v1/turns/{turn_id}?tokens=1", headers=own)).json()
    assert len(turn["tokens"]["output_ids"]) == turn["output_tokens"]
    for path in (f"/api/v1/sessions/{session_id}", f"/api/v1/turns/{turn_id}"):
        assert (await site.client.get(path, headers=other)).status_code == 404
    runs = (await site.client.get("/api/v1/runs", headers=other)).json()["runs"]
    assert [run["name"] for run in runs] == ["other"]


async def test_a_trainer_key_lists_the_runs_that_it_may_train(site: Site, run_id: str) -> None:
    await add_run(site.database, name="other")
    for own, names in ((run_id, ["calculator"]), (None, ["calculator", "other"])):
        key = await site.key(PrincipalKind.TRAINER, own)
        runs = (await site.client.get("/api/v1/runs", headers=key)).json()["runs"]
        assert [(run["name"], run["state"]) for run in runs] == [(name, "active") for name in names]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/v1/runs/calculator/resume"),
        ("GET", "/api/v1/runs/calculator/keys"),
        ("DELETE", "/api/v1/runs/calculator/keys/key_x"),
        ("GET", "/api/v1/health"),
    ],
)
async def test_operating_needs_an_admin_key(site: Site, run_id: str, method: str, path: str) -> None:
    for kind in (PrincipalKind.RUN, PrincipalKind.TRAINER):
        reply = await site.client.request(method, path, headers=await site.key(kind, run_id))
        assert reply.status_code == 403


async def test_pause_and_resume(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    assert (await site.client.post("/api/v1/runs/calculator/pause", headers=admin)).json()["state"] == "paused"
    assert (await site.client.get("/api/v1/runs/calculator", headers=admin)).json()["state"] == "paused"
    assert (await site.client.post(f"/api/v1/runs/{run_id}/resume", headers=admin)).json()["state"] == "active"
    assert (await site.client.post("/api/v1/runs/none/pause", headers=admin)).status_code == 404


async def test_a_trainer_pauses_its_own_run_with_a_reason(site: Site, run_id: str) -> None:
    admin, trainer = await site.key(PrincipalKind.ADMIN), await site.key(PrincipalKind.TRAINER, run_id)
    other = await site.key(PrincipalKind.TRAINER, await add_run(site.database, name="other"))
    path = "/api/v1/runs/calculator/pause"
    assert (await site.client.post(path, headers=other)).status_code == 404
    assert (await site.client.post(path, headers=await site.key(PrincipalKind.RUN, run_id))).status_code == 403

    async def problems() -> list[str]:
        found: list[str] = (await site.client.get("/api/v1/health", headers=admin)).json()["problems"]
        return [problem for problem in found if "paused" in problem]

    assert (await site.client.post(path, headers=trainer, params={"reason": "the loss"})).json()["state"] == "paused"
    assert await problems() == ["the run 'calculator' is paused: the loss"]
    assert (await site.client.post(f"/api/v1/runs/{run_id}/resume", headers=trainer)).status_code == 403
    await site.client.post(f"/api/v1/runs/{run_id}/resume", headers=admin)
    assert await problems() == []
    await site.client.post(path, headers=admin)
    assert await problems() == [], "somebody wanted it so"


async def test_a_key_is_shown_once_and_ends_with_its_revocation(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    path = "/api/v1/runs/calculator/keys"
    made = await site.client.post(path, headers=admin, json={"label": "laptop"})
    assert made.status_code == 201
    key = made.json()
    header = {"authorization": f"Bearer {key['key']}"}
    assert (await site.client.get("/api/v1/runs/calculator", headers=header)).status_code == 200
    listed = await site.client.get(path, headers=admin)
    assert [(one["id"], one["label"], one["revoked_at"]) for one in listed.json()["keys"]] == [
        (key["id"], "laptop", None)
    ]
    assert key["key"] not in listed.text
    assert (await site.client.delete(f"{path}/{key['id']}", headers=admin)).status_code == 204
    assert (await site.client.get("/api/v1/runs/calculator", headers=header)).status_code == 401
    assert (await site.client.delete(f"{path}/key_other", headers=admin)).status_code == 404


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/api/v1/runs/calculator/sessions?training=trained", "training"),
        ("/api/v1/runs/calculator/sessions?min_reward=much", "min_reward"),
        ("/api/v1/runs/calculator/sessions?min_reward=nan", "min_reward"),
        ("/api/v1/runs/calculator/sessions?limit=0", "limit"),
        ("/api/v1/runs/calculator/sessions?cursor=x", "cursor"),
        ("/api/v1/runs/calculator/steps/one", "version"),
    ],
)
async def test_wrong_values_are_refused_by_name(site: Site, run_id: str, path: str, param: str) -> None:
    reply = await site.client.get(path, headers=await site.key(PrincipalKind.ADMIN))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_key_of_an_unknown_kind_is_refused(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    for body, param in (({"kind": "admin"}, "kind"), ({"scope": "x"}, "scope")):
        reply = await site.client.post("/api/v1/runs/calculator/keys", headers=admin, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_events_stream_live_and_resume_where_a_client_left(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    async with serving(site) as address, httpx.AsyncClient(base_url=address, headers=admin, timeout=60) as client:
        async with client.stream("GET", "/api/v1/runs/calculator/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            first = await _event(lines)
            assert first["event"] == "snapshot"
            assert json.loads(first["data"])["run"]["mean_reward"] is not None
            await _log(site, run_id, "run.noted")
            second = await asyncio.wait_for(_event(lines), 60)
            assert [event["kind"] for event in json.loads(second["data"])["events"]] == ["run.noted"]
        await _log(site, run_id, "run.missed")
        headers = {"last-event-id": second["id"]}
        async with client.stream("GET", "/api/v1/runs/calculator/events", headers=headers) as stream:
            resumed = await _event(stream.aiter_lines())
    assert [event["kind"] for event in json.loads(resumed["data"])["events"]] == ["run.missed"]
    assert int(resumed["id"]) == int(second["id"]) + 1


async def _event(lines: Any) -> dict[str, str]:
    """Return the next server-sent event by field."""
    fields: dict[str, str] = {}
    async for line in lines:
        if not line:
            if fields:
                return fields
            continue
        name, _, value = line.partition(": ")
        if name:
            fields[name] = value
    raise AssertionError("the stream ended")


async def _log(site: Site, run_id: str, kind: str) -> None:
    await site.database.commit(
        lambda connection: append_event(connection, run_id=run_id, kind=kind, data={}, now=NOW)
    )
    site.signals.events.notify()
