"""The list of models in Anthropic's form."""

from __future__ import annotations

import anthropic
import pytest
from anthropic.types import ModelInfo

from proxy.dialects.listing import ListedModel
from proxy.dialects.messages.models import page
from proxy.errors import InvalidRequest
from tests.proxy.calls.world import World
from tests.proxy.dialects.messages.anthropic_client import sdk

VERSION = {"anthropic-version": "2023-06-01"}
FIVE = [ListedModel(name=name, created=1_700_000_000, context_length=512) for name in "abcde"]


async def test_the_sdk_lists_and_finds_models(world: World) -> None:
    async with sdk(world) as client:
        listed = [model async for model in client.models.list()]
        paged = [model.id async for model in client.models.list(limit=1)]
        found = await client.models.retrieve("policy@0")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("nope")
    assert [model.id for model in listed] == paged == ["policy", "policy@latest", "policy@0", "base/model"]
    assert all(ModelInfo.model_validate(model.to_dict()) for model in listed)
    assert (found.type, found.id, found.display_name, found.max_input_tokens) == (
        "model",
        "policy@0",
        "policy@0",
        512,
    )
    assert int(found.created_at.timestamp()) == int(world.store.run.created_at)


async def test_without_anthropics_header_models_have_openais_form(world: World) -> None:
    theirs, ours = await world.http.get("/v1/models", headers=VERSION), await world.http.get("/v1/models")
    assert theirs.json()["has_more"] is False
    assert ours.json()["object"] == "list"
    refused = await world.http.get("/v1/models/nope", headers=VERSION)
    assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "e"}, "cd", True),
        ({"limit": "2", "before_id": "c"}, "ab", False),
        ({"before_id": "a"}, "", False),
        ({"after_id": "a", "before_id": "d"}, "bc", True),
    ],
)
def test_pages(query: dict[str, str], ids: str, more: bool) -> None:
    listed = page(FIVE, query)
    assert [model["id"] for model in listed["data"]] == list(ids)
    assert listed["has_more"] is more
    assert (listed["first_id"], listed["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    ("query", "param"), [({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"after_id": "z"}, "after_id")]
)
def test_an_invalid_page_is_refused(query: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page(FIVE, query)
    assert caught.value.param == param
