from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from proxy.feedback.endpoints import LARGEST_REWARD, reward_value
from tests.proxy.domain_client import DomainClient


async def session(client: DomainClient) -> dict[str, Any]:
    answer = await client.http.post("/v1/sessions")
    assert answer.status_code == 201
    created: dict[str, Any] = answer.json()
    return created


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("1", 1.0),
        ("0.25", 0.25),
        ("-3", -3.0),
        ("true", 1.0),
        ("false", 0.0),
        ("1e-9", 1e-9),
        ("0", 0.0),
        ("1e12", 1e12),
    ],
)
async def test_numbers_and_booleans_are_rewards(domain: DomainClient, value: str, kept: float) -> None:
    created = await session(domain)
    body = f'{{"reward": {value}, "session_id": "{created["id"]}"}}'
    answer = await domain.http.post("/v1/feedback", content=body)
    assert answer.status_code == 201, answer.text
    assert answer.json() == {
        "effect": "recorded",
        "session_id": created["id"],
        "turn_id": None,
        "rewards": answer.json()["rewards"],
        "text": None,
    }
    assert await domain.store.reward_values(created["id"]) == [kept]


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e999", '"1"', '"up"', '"NaN"', "null", "[1]", "{}", "1" + "0" * 400, "1e13"],
)
async def test_everything_else_is_refused(domain: DomainClient, value: str) -> None:
    created = await session(domain)
    for body, param in (
        (f'{{"reward": {value}, "session_id": "{created["id"]}"}}', "reward"),
        (f'[{{"reward": 1}}, {{"reward": {value}}}]', "[1].reward"),
    ):
        answer = await domain.http.post("/v1/feedback", content=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param), answer.text
    if value != "null":
        body = f'{{"components": {{"format": {value}}}, "session_id": "{created["id"]}"}}'
        answer = await domain.http.post("/v1/feedback", content=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "components.format"), answer.text
    assert await domain.store.reward_values(created["id"]) == []


@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none() | st.lists(st.integers()))
def test_a_reward_is_a_bounded_number_or_nothing(value: object) -> None:
    try:
        accepted = reward_value(value)
    except PydanticCustomError:
        return
    assert isinstance(value, int | float)
    assert accepted == value
    assert abs(accepted) <= LARGEST_REWARD


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("", None),
        ("null", None),
        ("[]", None),
        ('"x"', None),
        ("{", None),
        ("\xff", None),
        ("[" * 100_000, None),
        ("{}", "reward"),
        ('{"reward": 1, "rewards": 2}', "rewards"),
        ('{"reward": 1, "session_id": 5}', "session_id"),
        ('{"reward": 1, "session_id": ""}', "session_id"),
        ('{"reward": 1, "session_id": "\\ud800"}', "session_id"),
        ('{"reward": 1, "name": ""}', "name"),
        ('{"reward": 1, "name": "a\\u001fb"}', "name"),
        ('{"reward": 1, "final": "yes"}', "final"),
        ('{"text": ""}', "text"),
        ('{"text": " \\n "}', "text"),
        ('{"text": 5}', "text"),
        ('{"text": "a\\u0000b"}', "text"),
        ('{"text": "\\ud800"}', "text"),
        ('{"text": "' + "x" * 16385 + '"}', "text"),
        ('{"text": "' + "x" * 1_000_000 + '"}', "text"),
        ('{"text": "words", "comment": "no reward"}', "reward"),
        ('{"text": "words"}', "session_id"),
        ('{"reward": 1, "idempotency_key": "a\\u001fb"}', "idempotency_key"),
        ('{"reward": 1, "components": {"reward": 1}}', "components"),
        ('{"reward": 1, "components": []}', "components"),
        ('{"reward": 1, "turn_id": "a", "completion_id": "b"}', "completion_id"),
        ('{"reward": 1}', "session_id"),
        ("[" + ",".join(['{"reward": 1}'] * 1025) + "]", None),
    ],
)
async def test_wrong_bodies_name_the_field(domain: DomainClient, body: str, param: str | None) -> None:
    answer = await domain.http.post("/v1/feedback", content=body.encode("latin-1"))
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), answer.text


async def test_a_comment_alone_is_refused_with_advice(domain: DomainClient) -> None:
    created = await session(domain)
    answer = await domain.http.post("/v1/feedback", json={"comment": "well done", "session_id": created["id"]})
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, "reward")
    assert "`text`" in error["message"]


async def test_feedback_on_an_erased_session_is_410(domain: DomainClient) -> None:
    created = await session(domain)
    await domain.store.set_session(created["id"], erased_at=1.0, erased_reason="requested")
    answer = await domain.http.post("/v1/feedback", json={"reward": 1, "session_id": created["id"]})
    assert (answer.status_code, error_of(answer)["code"]) == (410, "gone")


async def test_the_sessions_own_key_needs_no_name(domain: DomainClient) -> None:
    created = await session(domain)
    headers = {"authorization": f"Bearer {created['api_key']}"}
    answer = await domain.http.post("/v1/feedback", json={"reward": True}, headers=headers)
    assert (answer.status_code, answer.json()["session_id"]) == (201, created["id"])


async def test_a_completion_id_is_the_turns(domain: DomainClient) -> None:
    created = await session(domain)
    turn_id = await domain.store.add_turn(created["id"])
    answer = await domain.http.post("/v1/feedback", json={"reward": 1, "completion_id": turn_id})
    assert (answer.status_code, answer.json()["turn_id"]) == (201, turn_id)


async def test_late_rewards_answer_202(domain: DomainClient) -> None:
    created = await session(domain)
    await domain.store.add_turn(created["id"])
    await domain.store.set_session(created["id"], state="ended", training="consumed", consumed_by=1)
    body = {"reward": 1, "session_id": created["id"]}
    answer = await domain.http.post("/v1/feedback", json=body)
    assert (answer.status_code, answer.json()["effect"]) == (202, "recorded_after_training")
    batch = await domain.http.post("/v1/feedback", json=[body])
    assert (batch.status_code, len(batch.json()["results"])) == (202, 1)


async def test_a_list_answers_with_a_list(domain: DomainClient) -> None:
    sessions = [await session(domain) for _ in range(3)]
    body = [{"reward": index, "session_id": created["id"]} for index, created in enumerate(sessions)]
    answer = await domain.http.post("/v1/feedback", content=json.dumps(body))
    assert answer.status_code == 201
    assert [result["session_id"] for result in answer.json()["results"]] == [created["id"] for created in sessions]


@pytest.mark.parametrize("prefix", ["/v1", "", "/sessions/{id}/v1", "/sessions/{id}"])
async def test_feedback_is_where_the_model_is(domain: DomainClient, prefix: str) -> None:
    created = await session(domain)
    path = prefix.format(id=created["id"]) + "/feedback"
    body = {"reward": 1} if "sessions" in prefix else {"reward": 1, "session_id": created["id"]}
    answer = await domain.http.post(path, json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["session_id"] == created["id"]


async def test_a_session_that_the_statement_names_goes_before_the_paths(domain: DomainClient) -> None:
    one, other = await session(domain), await session(domain)
    answer = await domain.http.post(
        f"/sessions/{one['id']}/v1/feedback", json={"reward": 1, "session_id": other["id"]}
    )
    assert answer.json()["session_id"] == other["id"]


async def test_feedback_for_an_unopened_path_session_is_404(domain: DomainClient) -> None:
    answer = await domain.http.post("/sessions/never-opened/v1/feedback", json={"reward": 1})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"
