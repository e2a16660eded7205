"""Images in conversations with a model that reads text only, in every dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from proxy.calls import images
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import World, open_world

URL = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IN_CHAT: list[Any] = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": URL}}]
IN_MESSAGES: list[Any] = [{"type": "text", "text": "Look:"}, {"type": "image", "source": SOURCE}]
IN_RESPONSES: list[Any] = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": URL}]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": SOURCE}]}

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": IN_CHAT}]}),
    ("/v1/messages", {"max_tokens": 64, "messages": [{"role": "user", "content": IN_MESSAGES}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": IN_MESSAGES}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": IN_RESPONSES}]}),
]
PLACES = ["messages[0].content[1].type"] * 3 + ["input[0].content[1].type"]


@pytest_asyncio.fixture
async def naming(tmp_path: Path, template: ChatTemplate) -> AsyncIterator[World]:
    async with open_world(tmp_path, template, {"images": "name"}) as world:
        yield world


@pytest.mark.parametrize(
    ("path", "body", "place"), [(*call, place) for call, place in zip(CALLS, PLACES, strict=True)]
)
async def test_an_image_is_refused_with_its_place_and_what_would_take_it(
    world: World, path: str, body: dict[str, Any], place: str
) -> None:
    response = await world.http.post(path, json={"model": "policy", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, place, "unsupported_parameter")
    assert 'run.images = "name"' in error["message"]


@pytest.mark.parametrize(("path", "body"), [call for call in CALLS if "count" not in call[0]])
async def test_an_image_is_named_where_it_stood_and_warned_of(naming: World, path: str, body: dict[str, Any]) -> None:
    response = await naming.http.post(path, json={"model": "policy", **body})
    assert response.status_code == 200, response.text
    assert response.headers["x-base-rl-warning"].endswith("it was told [image] in the place of an image")
    said = naming.template.tokenizer.decode(list(naming.engine.requests[0].input_ids))
    assert "Look:" in said
    assert said.index("Look:") < said.index("[image]")
    (turn,) = await naming.turns()
    assert "[image]" in str(turn.messages)
    assert "AAAA" not in str((turn.messages, turn.request))


async def test_named_images_are_counted_as_the_text_that_they_are(naming: World) -> None:
    path, body = CALLS[2]
    counted = (await naming.http.post(path, json={"model": "policy", **body})).json()["input_tokens"]
    await naming.http.post("/v1/messages", json={"model": "policy", "max_tokens": 64, **body})
    assert counted == (await naming.turns())[0].prompt_token_count


async def test_the_next_call_continues_a_turn_with_an_image(naming: World) -> None:
    said: list[Any] = [{"role": "user", "content": IN_CHAT}]
    for _ in range(2):
        response = await naming.http.post("/v1/chat/completions", json={"model": "policy", "messages": said})
        said += [response.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    assert [turn.continuation for turn in await naming.turns()] == ["new", "exact"]


async def test_a_call_without_images_has_no_warning(naming: World) -> None:
    response = await naming.http.post(
        "/v1/chat/completions", json={"model": "policy", "messages": [{"role": "user", "content": 'An "image"'}]}
    )
    assert "x-base-rl-warning" not in response.headers


def test_images_in_the_results_of_tools_are_named() -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": [IN_RESPONSES[1]]}
    for body in ({"messages": [{"role": "user", "content": [RESULT]}]}, {"input": [item]}):
        raw, count = images.named(msgspec.json.encode(body))
        assert count == 1
        assert b"AAAA" not in raw
        assert b"[image]" in raw


def test_images_outside_the_conversation_are_not_changed() -> None:
    tool = {"type": "object", "properties": {"content": [{"type": "image"}]}}
    body = {"messages": [], "tools": [tool], "metadata": {"content": [{"type": "image"}]}}
    raw = msgspec.json.encode(body)
    assert images.named(raw) == (raw, 0)


def test_integers_of_any_size_stay() -> None:
    raw = b'{"messages":[{"role":"user","content":[{"type":"image"}]}],"seed":' + b"9" * 40 + b"}"
    assert b"9" * 40 in images.named(raw)[0]


JSON = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.sampled_from(["image", "image_url", "text"]),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["type", "content", "messages", "input", "x"]), inner)
    ),
)


@given(JSON)
def test_any_body_stays_one(body: Any) -> None:
    raw = msgspec.json.encode(body)
    changed, count = images.named(raw)
    assert (changed == raw) == (count == 0)
    msgspec.json.decode(changed)
    assert images.named(changed) == (changed, 0)


@pytest.mark.parametrize("raw", [b'"image"', b'{"image": ', b'[{"type": "image"}]', b"[" * 10**5 + b'"image"'])
def test_invalid_json_is_left_to_the_decoder(raw: bytes) -> None:
    assert images.named(raw) == (raw, 0)
