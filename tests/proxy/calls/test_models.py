from __future__ import annotations

import pytest

from proxy.auth.service import PrincipalKind
from proxy.settings import RunSettings
from tests.proxy.calls.world import World


async def ids(world: World, **headers: str) -> list[str]:
    return [entry["id"] for entry in (await world.http.get("/v1/models", headers=headers)).json()["data"]]


async def test_lists_the_runs_names_and_the_base_model_while_it_serves(world: World) -> None:
    assert await ids(world) == ["policy", "policy@latest", "policy@0", "base/model"]
    world.set_version(3)
    assert await ids(world) == ["policy", "policy@latest", "policy@3"]


@pytest.mark.parametrize("model", ["policy", "policy@latest", "policy@3"])
async def test_names_of_the_serving_version(world: World, model: str) -> None:
    world.set_version(3)
    answer = (await world.post({"model": model})).json()
    assert (answer["model"], answer["system_fingerprint"]) == (model, "policy@3")
    shown = (await world.http.get(f"/models/{model}")).json()
    assert shown == {"id": model, "object": "model", "created": 1_000_000, "owned_by": "base-rl"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("policy@2", "version 2 of the run 'policy' cannot be served"),
        ("policy@9", "cannot be served"),
        ("policy@9999999999", "there is no model"),
        ("base/model", "version 0"),
        ("gpt-4o", "there is no model 'gpt-4o'"),
        ("policy@", "there is no model"),
    ],
)
async def test_a_model_that_is_not_served_is_404_with_the_reason(world: World, model: str, says: str) -> None:
    world.set_version(3)
    response = await world.post({"model": model})
    assert response.status_code == 404
    error = response.json()["error"]
    assert says in error["message"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await world.http.get(f"/v1/models/{model}")).status_code == 404
    assert await world.sessions() == []


async def test_the_base_models_own_name_serves_version_zero(world: World) -> None:
    for model in ("base/model", "model"):
        assert (await world.post({"model": model})).status_code == 200


async def test_a_key_sees_only_its_own_run(world: World) -> None:
    other = await world.store.runs.ensure(RunSettings(name="other", model="base/model"))
    key = await world.store.credentials.create(PrincipalKind.RUN, run_id=other.id)
    assert (await world.post({}, authorization=f"Bearer {key.text}")).status_code == 404
    assert (await world.post({"model": "other"})).status_code == 404


async def test_an_admin_key_lists_and_does_not_call(world: World) -> None:
    key = await world.store.credentials.create(PrincipalKind.ADMIN)
    assert "policy" in await ids(world, authorization=f"Bearer {key.text}")
    assert (await world.post({}, authorization=f"Bearer {key.text}")).status_code == 404


async def test_while_nothing_serves_calls_are_503_with_retry_after(world: World) -> None:
    world.swaps.version = None
    response = await world.post({})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert (await world.post({"model": "nope"})).status_code == 404
    assert await ids(world) == ["policy"]
