"""The client's part of adapters by name and of scores, with engines that answer from a table."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import SamplingParameters
from proxy.engines.protocol import GenerateRequest, LabelSpan
from proxy.engines.replies import ReplyParser
from proxy.engines.requests import generate_body
from proxy.engines.scores import read_scores
from proxy.errors import AdapterNotLoaded, EngineFailed, InvalidEngineReply
from tests.engines.generating import ask, collect
from tests.engines.test_adapter import engine_that, reply, whole

HELD = {"object": "list", "data": [{"id": "m", "root": "m"}, {"id": "run:3", "root": "/w/3", "parent": "m"}]}
REFUSED = whole(400, {"success": False, "error_message": "LoRA adapter run:3 is already loaded"})
NOTHING = whole(200, {})


def test_an_answer_that_does_not_name_its_adapter_has_the_requested_one() -> None:
    spans = [{"version": "base", "start": 0, "end": 1}, {"version": "base2", "start": 1, "end": 2}]
    body = msgspec.json.encode(reply([1, 2], 2, {"type": "stop"}, weight_versions=spans))
    assert ReplyParser(adapter="run:3").parse(body).spans == (LabelSpan(label="run:3", start=0, end=2),)
    assert [span.label for span in ReplyParser().parse(body).spans] == ["base", "base2"]


@pytest.mark.parametrize("used", [None, "run:2"])
def test_an_answer_that_names_another_adapter_is_recorded_as_such(used: str | None) -> None:
    spans = [{"version": used or "base", "start": 0, "end": 2}]
    body = msgspec.json.encode(reply([1, 2], 2, {"type": "stop"}, weight_versions=spans, adapter=used))
    assert ReplyParser(adapter="run:3").parse(body).spans == (LabelSpan(label=used or "base", start=0, end=2),)


async def test_a_request_names_its_adapter_in_the_body_and_in_the_prefix_key() -> None:
    keys = []
    for label, adapter in itertools.product((None, "base"), (None, "run:2", "run:3")):
        request = GenerateRequest(
            request_id="r",
            input_ids=TokenIds.of((1, 2)),
            sampling=SamplingParameters(max_new_tokens=1),
            adapter=adapter,
        )

        def key(label: str | None = label) -> str | None:
            return label

        body = msgspec.json.decode(await generate_body(request, engine_id="r/", grammar_backend=None, prefix_key=key))
        assert body.get("lora_path") == adapter
        keys.append(body.get("extra_key"))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "message",
    [
        "Got LoRA adapter that has never been loaded: run:3\nAll loaded adapters: dict_keys([]).",
        "LoRA adapter 'run:3' was requested, but LoRA is not enabled. Please launch the server with …",
    ],
)
async def test_a_missing_adapter_is_not_an_error_of_the_request(message: str) -> None:
    refused = whole(400, {"error": {"message": message}})
    async with engine_that(refused) as (engine, _):
        with pytest.raises(AdapterNotLoaded, match="run:3"):
            await collect(engine, msgspec.structs.replace(ask(), adapter="run:3"))
        with pytest.raises(AdapterNotLoaded, match="run:3"):
            await engine.score((1, 2), "run:3")


async def test_loading_or_unloading_twice_is_not_an_error() -> None:
    others = {
        "/server_info": NOTHING,
        "/load_lora_adapter": REFUSED,
        "/unload_lora_adapter": REFUSED,
        "/v1/models": whole(200, HELD),
    }
    async with engine_that(NOTHING, others=others) as (engine, _):
        await engine.load_adapter("/w/3", "run:3")
        with pytest.raises(EngineFailed, match="already loaded"):
            await engine.load_adapter("/w/4", "run:3")
        with pytest.raises(EngineFailed, match="already loaded"):
            await engine.load_adapter("/w/4", "run:4")
        await engine.unload_adapter("run:4")
        with pytest.raises(EngineFailed):
            await engine.unload_adapter("run:3")


async def test_an_engine_without_adapters_is_not_asked_which_it_holds() -> None:
    model = whole(200, {"model_path": "m", "weight_version": "w"})
    others = {"/model_info": model, "/server_info": NOTHING, "/v1/models": whole(200, HELD)}
    async with engine_that(NOTHING, others=others) as (engine, paths):
        info = await engine.info()
        assert (info.named_adapters, info.adapter_names) == (False, ())
        assert "/v1/models" not in paths
    others["/server_info"] = whole(200, {"enable_lora": True})
    async with engine_that(NOTHING, others=others) as (engine, _):
        info = await engine.info()
        assert (info.named_adapters, info.adapter_names) == (True, ("run:3",))


def scored(*values: Any) -> bytes:
    return msgspec.json.encode({"output_ids": [9], "meta_info": {"input_token_logprobs": values}})


def test_scores_are_those_of_the_tokens_that_were_sent() -> None:
    assert read_scores(scored((None, 5, None), (-0.5, 6, None), (1e-6, 7, None)), (5, 6, 7)) == (-0.5, 0.0)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"meta_info": {}}',
        scored((None, 5, None)),
        scored((None, 5, None), (-0.5, 7, None)),
        scored((None, 5, None), (None, 6, None)),
        scored((None, 5, None), (0.7, 6, None)),
    ],
)
def test_scores_that_cannot_be_true_are_refused(content: bytes) -> None:
    with pytest.raises(InvalidEngineReply):
        read_scores(content, (5, 6))
