"""Helpers for tests of Anthropic's wire format: bodies, events validated by the SDK's models, and the SDK itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pydantic
from anthropic.types import Message, RawMessageStreamEvent

from tests.proxy.calls.world import USER, World, listening

PATH = "/v1/messages"
TOOL: Any = {"name": "calculator", "description": "Computes.", "input_schema": {"type": "object"}}
ASKED: Any = {"model": "policy", "max_tokens": 256, "messages": [USER]}

_EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)


async def ask(world: World, path: str = PATH, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await world.http.post(path, json={**ASKED, **body}, headers=headers)


async def answer(world: World, **body: Any) -> dict[str, Any]:
    """Return a whole answer, after the SDK's model has validated it."""
    response = await ask(world, **body)
    assert response.status_code == 200, response.text
    _only_known(Message.model_validate(response.json()))
    message: dict[str, Any] = response.json()
    return message


async def events(world: World, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream without pings, after the SDK's models have validated them."""
    response = await ask(world, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.text)


def read_events(text: str) -> list[dict[str, Any]]:
    *written, rest = text.split("\n\n")
    assert rest == ""
    events_read = []
    for lines in written:
        if lines.startswith(":"):
            continue
        named, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        if event["type"] == "ping":
            continue
        _only_known(_EVENTS.validate_python(event))
        events_read.append(event)
    return events_read


def _only_known(model: Any) -> None:
    """Assert that the SDK's model declares every field."""
    if isinstance(model, list):
        for item in model:
            _only_known(item)
    elif isinstance(model, pydantic.BaseModel):
        assert not model.model_extra, model
        for name in type(model).model_fields:
            _only_known(getattr(model, name))


@asynccontextmanager
async def sdk(world: World, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The SDK on a real connection."""
    async with (
        listening(world.app) as address,
        anthropic.AsyncAnthropic(
            **{"api_key": world.key, "base_url": address, "max_retries": 0, **options}
        ) as client,
    ):
        yield client
