"""Absurd bodies: every model endpoint answers with a clear 4xx, and other calls are not delayed."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.proxy.calls.world import USER, World, until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": [USER]},
    "/v1/completions": {"model": "policy", "prompt": "x"},
    "/v1/responses": {"model": "policy", "input": "x"},
    "/v1/messages": {"model": "policy", "max_tokens": 5, "messages": [USER]},
}
PATHS = pytest.mark.parametrize("path", BODIES)
DEEP = b"[" * 100_000 + b"]" * 100_000


def with_field(path: str, field: bytes) -> bytes:
    return json.dumps(BODIES[path]).encode()[:-1] + b"," + field + b"}"


async def refused(world: World, path: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    response = await world.http.post(path, content=body, headers={"content-type": content_type})
    assert response.status_code == 400, response.text[:200]
    assert world.engine.requests == []
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    return error


@PATHS
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"{}}",
        DEEP,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        '{"model": "policy"}'.encode("utf-16"),
        '{"model": "policy"}'.encode("utf-32"),
        b"\x1f\x8b\x08\x00compressed",
        b"\x00\x00\x00",
    ],
)
async def test_a_body_that_is_not_a_json_object(world: World, path: str, body: bytes) -> None:
    await refused(world, path, body)


@PATHS
@pytest.mark.parametrize(
    "field",
    [
        b'"zzz":' + DEEP,
        b'"metadata":' + DEEP,
        b'"user":"\\ud800"',
        b'"\\udfff":1',
        b'"user":"\xe9"',
        b'"zzz":1e400',
        b'"temperature":1e400',
        b'"temperature":NaN',
        b'"temperature":Infinity',
        b'"temperature":' + b"9" * 5000,
        b'"user":"a\x00b"',
        b'"model":null',
        b'"temperature":"hot"',
        b'"stop":'
        + json.dumps(["a"] * 10_000).encode()
        + b',"stop_sequences":'
        + json.dumps(["a"] * 10_000).encode(),
    ],
)
async def test_absurd_fields(world: World, path: str, field: bytes) -> None:
    await refused(world, path, with_field(path, field))


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "stop"), ("/v1/completions", "stop"), ("/v1/messages", "stop_sequences")],
)
async def test_ten_thousand_stop_strings_are_refused(world: World, path: str, field: str) -> None:
    stops = json.dumps(["a"] * 10_000).encode()
    assert (await refused(world, path, with_field(path, b'"%b":%b' % (field.encode(), stops))))["param"] == field


@pytest.mark.parametrize("n", [b"129", b"1" + b"0" * 30, b"-1", b"0", b"1.5", b'"2"', b"true"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_absurd_number_of_choices(world: World, path: str, n: bytes) -> None:
    assert (await refused(world, path, with_field(path, b'"n":' + n)))["param"] == "n"


def many_tools(path: str, count: int) -> bytes:
    """Return tools that are valid in every dialect at once."""
    parameters = {"type": "object"}
    tools = []
    for index in range(count):
        named = {"name": f"f{index}", "parameters": parameters, "input_schema": parameters}
        kind = "custom" if path == "/v1/messages" else "function"
        tools.append({"type": kind, **named, "function": named})
    return with_field(path, b'"tools":' + json.dumps(tools).encode())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("count", "code"), [(1_000, "context_length_exceeded"), (10_000, "invalid_request")])
async def test_thousands_of_tools_do_not_fit(world: World, path: str, count: int, code: str) -> None:
    response = await world.http.post(path, content=many_tools(path, count))
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert world.engine.requests == []
    assert await world.turns() == []


async def test_a_large_call_does_not_delay_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    render = type(world.template).render

    def slow(template: Any, messages: Any, tools: Any, **options: Any) -> str:
        if tools:
            begun.set()
            assert go_on.wait(60)
        return render(template, messages, tools, **options)

    monkeypatch.setattr(type(world.template), "render", slow)
    large = asyncio.create_task(world.http.post("/v1/messages", content=many_tools("/v1/messages", 1_000)))
    await until(begun.is_set)
    assert (await world.post({})).status_code == 200
    go_on.set()
    assert (await large).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_megabytes_of_text_are_refused_without_being_tokenised(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the answer is 42 " * 200_000
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {**BODIES[path], field: [{"role": "user", "content": text}] if field == "messages" else text}
    encoded: list[int] = []
    encode = type(world.template).encode

    def counted(template: Any, text: str) -> tuple[int, ...]:
        encoded.append(len(text))
        return encode(template, text)

    monkeypatch.setattr(type(world.template), "encode", counted)
    response = await world.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert max(encoded, default=0) < len(text) / 10


@PATHS
@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png",
     "application/json; charset=utf-16"],
)  # fmt: skip
async def test_a_json_body_is_read_whatever_its_content_type(world: World, path: str, content_type: str) -> None:
    """Many clients send no content type, or a wrong one."""
    body = json.dumps(BODIES[path]).encode()
    response = await world.http.post(path, content=body, headers={"content-type": content_type})
    assert response.status_code == 200, response.text
    await refused_form(world, path, content_type)


async def refused_form(world: World, path: str, content_type: str) -> None:
    response = await world.http.post(path, content=b"model=policy&prompt=x", headers={"content-type": content_type})
    assert response.status_code == 400


async def test_an_escaped_nul_is_a_character_like_others(world: World) -> None:
    for path, body in BODIES.items():
        asked = json.dumps({**body, "user": "a\0b"}).replace("What", "Wh\\u0000at")
        response = await world.http.post(path, content=asked.encode())
        assert response.status_code == 200, response.text
