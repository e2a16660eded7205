"""/openapi.json describes the API as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from proxy.app import create_app
from proxy.errors import BaseRlError, InvalidRequest
from proxy.http.anthropic import anthropic_envelope
from proxy.settings import EngineSettings, Settings
from tests.proxy.calls.world import TOOLS, USER

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "assistant"},
            USER,
        ],
        "tools": TOOLS, "tool_choice": "auto", "stop": "x", "n": 2, "response_format": {"type": "text"},
        "stream_options": {"include_usage": True}, "temperature": None, "x_unknown": 1,
    },
    "/v1/completions": {"model": "policy", "prompt": [[1, 2], [3]], "logprobs": 3, "stop": ["a"], "echo": None},
    "/v1/responses": {"model": "policy", "input": "x", "tools": []},
    "/v1/responses/input_tokens": {"model": "policy", "input": "x"},
    "/v1/messages": {"model": "policy", "max_tokens": 5, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "policy", "messages": [USER]},
    "/v1/sessions": {"n": 4, "task": "x", "metadata": {"a": [1]}},
    "/v1/sessions/{session_id}/end": {"outcome": "failed"},
    "/v1/feedback": {"reward": 1, "session_id": "ses_1", "components": {"speed": 0.5}},
    "/v1/feedback/preference": {"chosen": "ses_1", "rejected": "turn_2", "source": "ada"},
}  # fmt: skip
WRONG: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": [USER]},
        {"model": "policy", "messages": []},
        {"model": "policy", "messages": [{"role": "user"}]},
        {"model": "policy", "messages": [USER], "n": 129},
        {"model": "policy", "messages": [USER], "tools": [{"type": "function", "function": {"name": ""}}]},
        {"model": "policy", "messages": [USER], "response_format": "json"},
    ],
    "/v1/completions": [{"model": "policy"}, {"model": "policy", "prompt": [1, "a"]}],
    "/v1/sessions": [{"no_such_field": 1}, {"n": 0}],
    "/v1/feedback": [{"reward": "good"}, []],
    "/v1/feedback/preference": [{"chosen": "ses_1"}, {"chosen": "ses_1", "rejected": ""}],
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings(engine=EngineSettings(url="http://127.0.0.1:1"))).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_described(document: dict[str, Any], path: str) -> None:
    schema = body_schema(document, path)
    Draft202012Validator.check_schema(schema)
    assert "$ref" not in json.dumps(schema)
    Draft202012Validator(schema).validate(BODIES[path])


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, bodies in WRONG.items() for body in bodies])
def test_wrong_bodies_do_not_fit_their_description(document: dict[str, Any], path: str, body: Any) -> None:
    assert not Draft202012Validator(body_schema(document, path)).is_valid(body)


def test_every_endpoint_of_agents_that_takes_a_body_is_described(document: dict[str, Any]) -> None:
    taking = {path for path, method, operation in operations(document) if "requestBody" in operation}
    assert {path for path in taking if not path.startswith("/api/")} == set(BODIES)


def test_every_operation_has_the_envelope_for_errors_and_no_other(document: dict[str, Any]) -> None:
    envelope = {"$ref": "#/components/schemas/Error"}
    for path, _method, operation in operations(document):
        answers = operation["responses"]
        assert "422" not in answers, path
        for statuses in ("4XX", "5XX"):
            assert answers[statuses]["content"] == {"application/json": {"schema": envelope}}, path
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_keys_are_described_where_they_are_needed(document: dict[str, Any]) -> None:
    without = {path for path, _method, operation in operations(document) if "security" not in operation}
    assert without == {"/healthz", "/readyz", "/metrics"}
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}


def test_errors_are_as_described(document: dict[str, Any]) -> None:

    validator = Draft202012Validator(document["components"]["schemas"]["Error"])
    for error in (BaseRlError("x"), InvalidRequest("x", param="n")):
        validator.validate(error.envelope())
        validator.validate(anthropic_envelope(error.envelope(), "req_1"))


def test_streams_are_described(document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}, path
