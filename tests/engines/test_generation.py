"""How every engine answers a request, through the adapter and on the wire."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import httpx
import msgspec
import pytest
import torch

from proxy.engines.protocol import EngineChunk, EngineFinish, LabelSpan, PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.errors import ContextLengthExceeded, EngineFailed, InvalidRequest
from tests.engines.conftest import Models, Reference, Server, becomes_idle
from tests.engines.generating import PROMPT, ask, collect, open_stream
from tests.engines.tiny_model import CONTEXT, VOCABULARY, make_tokenizer


async def test_greedy_answers_are_those_of_transformers(
    engine: SglangEngine, server: Server, reference: Reference
) -> None:
    answer = await collect(engine, ask(max_new_tokens=24))
    assert answer.ids == reference.greedy(PROMPT, 24)
    assert answer.logprobs == pytest.approx(reference.of_output(PROMPT, answer.ids), abs=server.exactness)
    assert answer.finish is EngineFinish.LENGTH
    assert answer.spans == (LabelSpan(label="a", start=0, end=24),)


async def test_streaming_gives_the_same_tokens_in_many_chunks(engine: SglangEngine) -> None:
    whole = await collect(engine, ask())
    streamed = await collect(engine, ask(stream=True))
    assert streamed.ids == whole.ids
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert streamed.spans == whole.spans
    assert whole.chunks == 1
    assert streamed.chunks > 1


async def test_logprobs_are_of_the_temperature_scaled_distribution(
    engine: SglangEngine, server: Server, reference: Reference
) -> None:
    answer = await collect(engine, ask(temperature=0.6, max_new_tokens=30))
    expected = reference.of_output(PROMPT, answer.ids, temperature=0.6)
    assert answer.logprobs == pytest.approx(expected, abs=server.exactness)


async def test_concurrent_requests_of_different_lengths_do_not_disturb_each_other(
    engine: SglangEngine, server: Server, reference: Reference
) -> None:
    prompts = [PROMPT[: 3 + index] for index in range(12)]
    requests = [
        ask(prompt, max_new_tokens=4 + 3 * index, stream=index % 2 == 0) for index, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert answer.ids == reference.greedy(prompt, request.sampling.max_new_tokens)
        assert answer.logprobs == pytest.approx(reference.of_output(prompt, answer.ids), abs=server.exactness)


async def test_a_stop_token_ends_the_answer_and_is_its_last_id(engine: SglangEngine, reference: Reference) -> None:
    expected = reference.greedy(PROMPT, 16)
    stop = expected[5]
    end = expected.index(stop) + 1
    answer = await collect(engine, ask(stop_token_ids=(stop,)))
    assert answer.ids == expected[:end]
    assert answer.finish is EngineFinish.STOP


async def test_a_stop_string_over_several_tokens_ends_the_answer(engine: SglangEngine) -> None:
    tokenizer = make_tokenizer()
    letters = {str(token): 90.0 for token in tokenizer.encode("abcdefghijklmnopqrstuvwxyz")}
    free = await collect(engine, ask(logit_bias=letters))
    text = str(tokenizer.decode(list(free.ids)))
    assert len(text) == len(free.ids) == 16, "one letter a token"
    stop = text[4:7]
    answer = await collect(engine, ask(logit_bias=letters, stop=("ZZ", stop)))
    assert answer.finish is EngineFinish.STOP
    assert answer.ids == free.ids[: text.index(stop) + len(stop)]


async def test_the_end_token_of_the_model_ends_the_answer(engine: SglangEngine) -> None:
    answer = await collect(engine, ask(logit_bias={"256": 100.0}))
    assert answer.ids == (256,)
    assert answer.finish is EngineFinish.STOP


async def test_top_k_of_one_is_greedy_also_at_a_temperature(engine: SglangEngine, reference: Reference) -> None:
    answer = await collect(engine, ask(temperature=1.5, top_k=1))
    assert answer.ids == reference.greedy(PROMPT, 16)


async def test_samples_differ_from_each_other(engine: SglangEngine) -> None:
    answers = await asyncio.gather(*(collect(engine, ask(temperature=1.0)) for _ in range(4)))
    assert len({answer.ids for answer in answers}) == 4


async def test_the_engine_reports_whether_it_draws_by_seed(engine: SglangEngine, server: Server) -> None:
    assert await engine.draws_by_seed() == (server.kind != "sglang")


async def test_a_seed_gives_the_same_answer_in_any_batch(engine: SglangEngine, server: Server) -> None:
    if server.kind == "sglang":
        pytest.skip("SGLang honours seeds only with --enable-deterministic-inference, which its CPU backend lacks")
    first = await collect(engine, ask(temperature=1.0, seed=7))
    again, other, *_ = await asyncio.gather(
        *(collect(engine, ask(temperature=1.0, seed=seed)) for seed in (7, 8)),
        *(collect(engine, ask(temperature=1.0)) for _ in range(5)),
    )
    assert again.ids == first.ids
    assert other.ids != first.ids


async def test_a_request_beyond_the_context_is_refused(engine: SglangEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        await collect(engine, ask(tuple([5] * (CONTEXT + 1))))
    with pytest.raises(ContextLengthExceeded):
        await collect(engine, ask(max_new_tokens=CONTEXT))
    with pytest.raises(ContextLengthExceeded):
        await collect(engine, ask(max_new_tokens=CONTEXT, stream=True))


async def test_values_out_of_range_are_refused(engine: SglangEngine) -> None:
    for wrong in ({"top_p": 1.5}, {"presence_penalty": 3.0}, {"logit_bias": {"100000": 1.0}}):
        with pytest.raises(InvalidRequest):
            await collect(engine, ask(**wrong))


async def test_abort_ends_a_request_with_what_it_has(engine: SglangEngine) -> None:
    request = ask(stream=True, max_new_tokens=400)
    chunks: list[EngineChunk] = []
    async with aclosing(open_stream(engine, request)) as stream:
        async for chunk in stream:
            if not chunks:
                await engine.abort(request.request_id)
            chunks.append(chunk)
    assert chunks[-1].finish is EngineFinish.ABORT
    count = sum(len(chunk.output_ids) for chunk in chunks)
    assert 0 < count < 400
    assert chunks[-1].spans[-1].end == count


async def test_an_abort_does_not_reach_requests_whose_id_begins_alike(engine: SglangEngine) -> None:
    request = msgspec.structs.replace(ask(stream=True, max_new_tokens=60), request_id="begin-12")
    finish = None
    async for chunk in engine.generate(request):
        await engine.abort("begin-1")
        finish = chunk.finish
    assert finish is EngineFinish.LENGTH


async def test_closing_the_iterator_frees_the_engine(engine: SglangEngine, http: httpx.AsyncClient) -> None:
    stream = open_stream(engine, ask(stream=True, max_new_tokens=450))
    await anext(stream)
    await engine.pause(PauseMode.IN_PLACE)
    await stream.aclose()
    await engine.resume()
    assert await becomes_idle(http)


async def test_cancelling_a_waiting_call_frees_the_engine(engine: SglangEngine, http: httpx.AsyncClient) -> None:
    await engine.pause(PauseMode.IN_PLACE)
    task = asyncio.create_task(collect(engine, ask(max_new_tokens=450)))
    _, pending = await asyncio.wait([task], timeout=0.3)
    assert pending
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await engine.resume()
    assert await becomes_idle(http)


async def test_a_client_that_leaves_without_a_word_is_aborted(engine: SglangEngine, http: httpx.AsyncClient) -> None:
    body = {
        "input_ids": list(PROMPT),
        "sampling_params": {"max_new_tokens": 450, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    async with http.stream("POST", "/generate", json=body) as response:
        await anext(response.aiter_lines())
        await engine.pause(PauseMode.IN_PLACE)
    await engine.resume()
    assert await becomes_idle(http)


async def test_the_wire_is_sglangs(http: httpx.AsyncClient, engine: SglangEngine) -> None:
    body = {
        "input_ids": list(PROMPT),
        "rid": "wire",
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
    }
    reply = (await http.post("/generate", json=body)).json()
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 5
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["id"] == "wire"
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["completion_tokens"] == 5
    assert meta["weight_version"] == "a"
    assert meta["weight_versions"] == [{"version": "a", "start": 0, "end": 5}]

    async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"

    refused = await http.post("/generate", json={"input_ids": [1] * (CONTEXT + 1)})
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert "context length" in refused.json()["error"]["message"]


async def test_the_input_is_scored(
    http: httpx.AsyncClient, engine: SglangEngine, server: Server, reference: Reference
) -> None:
    """In SGLang's form: the first one has no log-probability, whatever precedes it."""
    ids = [*PROMPT, 5, 6, 7]
    with torch.no_grad():
        wanted = reference.network(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    asked = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.7},
        "return_logprob": True,
    }
    for start in (0, len(ids) - 3, len(ids) - 1):
        body = {**asked, "logprob_start_len": start}
        told = (await http.post("/generate", json=body)).json()["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in told] == ids[start:]
        assert told[0][0] is None
        for place, (logprob, token, *_) in enumerate(told[1:], start + 1):
            assert logprob == pytest.approx(wanted[place - 1, token].item(), abs=server.exactness)
    assert not (await http.post("/generate", json=asked)).json()["meta_info"].get("input_token_logprobs")


async def test_only_input_tokens_are_scored(http: httpx.AsyncClient, server: Server) -> None:
    if server.kind != "embedded":
        pytest.skip("SGLang answers with its own error")
    body = {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 2}
    refused = await http.post("/generate", json=body)
    assert refused.status_code == 400
    assert "logprob_start_len" in refused.text


async def test_a_score_is_that_of_transformers_and_leaves_answers_as_they_were(
    engine: SglangEngine, server: Server, models: Models
) -> None:
    ids = (*PROMPT, 5, 6, 7)
    expected = Reference(models.a).plain(ids)
    for _ in range(2):  # the second one could reuse a prefix from the cache of the first
        assert await engine.score(ids) == pytest.approx(expected, abs=server.exactness)
    before = await collect(engine, ask())
    # SGLang scores another id in its place, and says so.
    with pytest.raises((InvalidRequest, EngineFailed)):
        await engine.score((VOCABULARY + 1, 1))
    assert (await collect(engine, ask())).logprobs == pytest.approx(before.logprobs, abs=server.exactness)
