"""The adapter with engines that misbehave, and with both ways of streaming."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.contract.turn import Constraint, ConstraintKind, SamplingParameters
from proxy.engines.protocol import EngineFinish, LabelSpan, PauseMode
from proxy.engines.replies import ReplyParser
from proxy.engines.requests import sampling_body
from proxy.engines.sglang import SglangEngine
from proxy.engines.streams import EventLines
from proxy.errors import (
    BaseRlError,
    ContextLengthExceeded,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    UnsupportedParameter,
)
from proxy.settings import EngineSettings
from tests.engines.conftest import NOBODY
from tests.engines.generating import ask, collect, gather, open_stream
from tests.proxy.calls.world import listening

Answerer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def reply(ids: list[int], total: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    scored = [[-0.1 * token, token, None] for token in ids]
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": total,
            "weight_version": "w",
            "output_token_logprobs": scored,
            "finish_reason": finish,
            **meta,
        },
    }


@asynccontextmanager
async def engine_that(
    answer: Answerer, *, read_timeout: float = 30.0, others: dict[str, Answerer] | None = None
) -> AsyncIterator[tuple[SglangEngine, list[str]]]:
    """Yield an adapter and the paths that it requests. Its server answers `/generate` by `answer`, the paths in
    `others` by theirs, and everything else with an empty 200."""
    paths: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        paths.append(path)
        if path == "/generate":
            await answer(path, writer)
        elif others is not None and path in others:
            await others[path](path, writer)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    engine = SglangEngine(url, EngineSettings(url=url, read_timeout_seconds=read_timeout))
    async with server:
        yield engine, paths
        await engine.aclose()


def whole(status: int, body: object) -> Answerer:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()

    return answer


def stream(*events: object, then: Callable[[], Awaitable[object]] | None = None) -> Answerer:
    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for event in events:
            data = b"data: " + (event if isinstance(event, bytes) else msgspec.json.encode(event)) + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
        if then is not None:
            await then()
        else:
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    return answer


async def die() -> None:
    """Close the connection in the middle of the body."""


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (whole(400, {"error": {"message": "top_p must be in (0, 1]"}}), InvalidRequest, "top_p"),
        (whole(400, {"error": "input_ids: wrong"}), InvalidRequest, "input_ids"),
        (whole(400, {"message": "It exceeds the context length"}), ContextLengthExceeded, "context length"),
        (whole(404, b"no such page"), EngineFailed, "no such page"),
        (whole(500, {"error": {"message": "boom"}}), EngineFailed, "boom"),
        (whole(503, b"starting"), EngineUnavailable, "starting"),
        (whole(200, b"<html>"), EngineFailed, "cannot be read"),
        (whole(200, {"output_ids": [1]}), EngineFailed, "meta_info"),
        (whole(200, reply([1, 2], 3, {"type": "stop"})), EngineFailed, "2 output ids"),
        (whole(200, reply([1], 1, {"type": "abort", "status_code": 400, "message": "bad"})), InvalidRequest, "bad"),
        (whole(200, reply([1], 1, {"type": "sorcery"})), EngineFailed, "sorcery"),
    ],
)
async def test_answers_become_errors(answer: Answerer, error: type[BaseRlError], words: str) -> None:
    async with engine_that(answer) as (engine, _):
        with pytest.raises(error, match=words):
            await collect(engine, ask())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (stream(reply([1], 1), then=die), EngineUnavailable),
        (stream(reply([1], 1)), EngineUnavailable),
        (stream(reply([1], 1), b"[DONE]"), EngineUnavailable),
        (stream(reply([1], 1), {"error": {"message": "no", "code": 400}}), InvalidRequest),
        (stream(reply([1], 1), {"error": {"message": "no", "code": 500}}), EngineFailed),
        (stream(reply([1], 1), reply([2], 9)), EngineFailed),
        (stream(b"{"), EngineFailed),
    ],
)
async def test_streams_that_break_become_errors(answer: Answerer, error: type[BaseRlError]) -> None:
    async with engine_that(answer) as (engine, _):
        with pytest.raises(error):
            await collect(engine, ask(stream=True))


async def test_an_engine_that_is_down_is_unavailable() -> None:
    engine = SglangEngine(NOBODY, EngineSettings(url=NOBODY))
    for request in (ask(), ask(stream=True)):
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await collect(engine, request)
    for call in (engine.info(), engine.pause(PauseMode.IN_PLACE), engine.load_weights("x", "y"), engine.abort("x")):
        with pytest.raises(EngineUnavailable):
            await call
    await engine.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_stops_answering_times_out_and_gets_an_abort(streamed: bool) -> None:
    silence = asyncio.Event()
    events = [reply([1], 1)] if streamed else []
    async with engine_that(stream(*events, then=silence.wait), read_timeout=0.2) as (engine, paths):
        with pytest.raises(EngineTimeout):
            await collect(engine, ask(stream=streamed))
        await engine.aclose()
        assert paths[-1] == "/abort_request"
        silence.set()


async def test_leaving_early_aborts_and_finishing_does_not() -> None:
    async with engine_that(stream(reply([1], 1), reply([2], 2, {"type": "stop"}), b"[DONE]")) as (engine, paths):
        chunks = open_stream(engine, ask(stream=True))
        await anext(chunks)
        await chunks.aclose()
        await engine.aclose()
        assert "/abort_request" not in paths
    silence = asyncio.Event()
    async with engine_that(stream(reply([1], 1), then=silence.wait)) as (engine, paths):
        chunks = open_stream(engine, ask(stream=True))
        await anext(chunks)
        await chunks.aclose()
        await engine.aclose()
        assert paths[-1] == "/abort_request"
        silence.set()


async def test_events_that_come_together_are_one_chunk() -> None:
    last = reply([2, 3], 3, {"type": "stop"})
    async with engine_that(stream(reply([1], 1), last, b"[DONE]")) as (engine, _):
        (chunk,) = [chunk async for chunk in open_stream(engine, ask(stream=True))]
    assert chunk.output_ids == (1, 2, 3)
    assert chunk.logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert chunk.finish is EngineFinish.STOP
    assert chunk.spans == (LabelSpan(label="w", start=0, end=3),)


async def test_text_before_a_failure_is_returned() -> None:
    async with engine_that(stream(reply([1], 1), reply([2], 2), b"{")) as (engine, _):
        chunks = open_stream(engine, ask(stream=True))
        assert (await anext(chunks)).output_ids == (1, 2)
        with pytest.raises(EngineFailed):
            await anext(chunks)


@given(st.lists(st.sampled_from(["1", "22", "", "x\u00e9"]), max_size=8), st.integers(1, 9), st.booleans())
def test_events_are_the_same_however_they_are_cut(texts: list[str], size: int, crlf: bool) -> None:
    ending = b"\r\n" if crlf else b"\n"
    wire = b"".join(b": comment%sdata: %s%s%s" % (ending, text.encode(), ending, ending) for text in texts)
    wire += b"data: [DONE]" + ending * 2 + b"data: more" + ending
    lines = EventLines()
    found = [event for start in range(0, len(wire), size) for event in lines.feed(wire[start : start + size])]
    assert [event.decode() for event in found[: len(texts)]] == texts
    assert lines.over


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30), st.data())
def test_increments_and_everything_so_far_read_the_same(ids: list[int], data: st.DataObject) -> None:
    """The chunks may differ in size, and each may have either form."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1)))) if len(ids) > 1 else []
    ends = [*(cut for cut in cuts if cut), len(ids)]
    parser, chunks, start = ReplyParser(), [], 0
    for end in ends:
        cumulative = data.draw(st.booleans())
        finish = {"type": "length", "length": end} if end == len(ids) else None
        body = reply(ids[:end] if cumulative else ids[start:end], end, finish)
        chunks.append(parser.parse(msgspec.json.encode(body)))
        start = end
    answer = gather(chunks)
    assert answer.ids == tuple(ids)
    assert answer.logprobs == pytest.approx([-0.1 * token for token in ids])
    assert answer.finish is EngineFinish.LENGTH
    assert answer.spans == (LabelSpan(label="w", start=0, end=len(ids)),)


@pytest.mark.parametrize(
    "change",
    [
        {"output_token_logprobs": [[-0.1, 1, None]]},
        {"output_token_logprobs": [[-0.1, 1, None], [-0.1, 3, None]]},
        {"output_token_logprobs": [[-0.1, 1, None], [None, 2, None]]},
        {"weight_versions": [{"version": "a", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 0, "end": 2}]},
    ],
)
def test_replies_that_do_not_add_up_are_refused(change: dict[str, Any]) -> None:
    body = reply([1, 2], 2, {"type": "stop"}, **change)
    with pytest.raises(EngineFailed):
        ReplyParser().parse(msgspec.json.encode(body))


def test_top_logprobs_leave_out_what_a_mask_keeps_out() -> None:
    """SGLang reports the lowest float for such tokens; a token may also have no value at all."""
    tops = [[[-0.1, 1, None], [-3.4e38, 7, None]], None]
    chunk = ReplyParser().parse(msgspec.json.encode(reply([1, 2], 2, {"type": "stop"}, output_top_logprobs=tops)))
    assert chunk.top_logprobs == (((1, -0.1),), ())
    with pytest.raises(EngineFailed):
        ReplyParser().parse(msgspec.json.encode(reply([1, 2], 2, {"type": "stop"}, output_top_logprobs=tops[:1])))


async def test_a_constraint_refused_in_mid_stream_is_reported_as_refused() -> None:
    """SGLang sends a token without a log-probability along with the refusal."""
    finish = {"type": "abort", "status_code": 400, "message": "Failed to compile json grammar: no"}
    late = reply([140], 1, finish, output_token_logprobs=[])
    async with engine_that(stream(late, b"[DONE]")) as (engine, _):
        with pytest.raises(UnsupportedParameter, match="Failed to compile"):
            await collect(engine, ask(stream=True))


def test_an_answer_without_tokens_has_no_spans() -> None:
    spans = [{"version": "a", "start": 0, "end": 0}]
    chunk = ReplyParser().parse(msgspec.json.encode(reply([], 0, {"type": "abort"}, weight_versions=spans)))
    assert chunk.finish is EngineFinish.ABORT
    assert chunk.spans == ()


def test_sampling_is_sent_in_sglangs_words() -> None:
    assert sampling_body(SamplingParameters(max_new_tokens=5)) == {
        "max_new_tokens": 5,
        "temperature": 1.0,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    everything = SamplingParameters(
        max_new_tokens=5,
        temperature=0.0,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=0,
        stop=("x",),
        stop_token_ids=(7,),
        logit_bias={"3": 1.0},
    )
    assert sampling_body(everything) == {
        "max_new_tokens": 5,
        "temperature": 0.0,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "sampling_seed": 0,
        "stop": ("x",),
        "stop_token_ids": (7,),
        "logit_bias": {"3": 1.0},
    }


@pytest.mark.parametrize(("info", "seeded"), [({"enable_deterministic_inference": True}, True), ({}, False)])
async def test_whether_it_draws_by_seed_is_looked_up_once(info: dict[str, Any], seeded: bool) -> None:
    async with engine_that(whole(200, {}), others={"/server_info": whole(200, info)}) as (engine, paths):
        assert [await engine.draws_by_seed() for _ in range(3)] == [seeded] * 3
        assert paths == ["/server_info"]


async def test_an_engine_without_a_grammar_back_end_gets_no_constrained_request() -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, text="a")
    async with engine_that(whole(200, {}), others={"/server_info": whole(200, {"grammar_backend": "none"})}) as (
        engine,
        paths,
    ):
        with pytest.raises(UnsupportedParameter, match="constrained decoding"):
            await collect(engine, ask(constraint=constraint))
        await engine.aclose()
        assert "/generate" not in paths


@asynccontextmanager
async def engine_with_labels(
    reported: Iterator[str], served: Iterator[str]
) -> AsyncIterator[tuple[SglangEngine, list[str], list[str]]]:
    """Yield an adapter of an engine with a prefix cache, with the keys and the ids of the requests that it sends.

    `reported` are the labels that `/model_info` names, `served` those of the first tokens.
    """
    keys: list[str] = []
    ids: list[str] = []

    async def model_info(_: Request) -> Response:
        return JSONResponse({"model_path": "m", "weight_version": next(reported)})

    async def generate(request: Request) -> Response:
        body = await request.json()
        keys.append(body["extra_key"])
        ids.append(body["rid"])
        answer = reply([7], 1, {"type": "length", "length": 1}, weight_version=next(served))
        return Response(b"data: " + msgspec.json.encode(answer) + b"\n\ndata: [DONE]\n\n")

    routes = [
        Route("/model_info", model_info),
        Route("/server_info", lambda _: JSONResponse({})),
        Route("/generate", generate, methods=["POST"]),
        Route("/abort_request", lambda _: Response(), methods=["POST"]),
    ]
    async with listening(Starlette(routes=routes)) as url:
        engine = SglangEngine(url, EngineSettings(url=url))
        yield engine, keys, ids
        await engine.aclose()


async def test_a_label_that_may_have_been_served_before_has_a_prefix_key_of_its_own() -> None:
    labels = ["v4", "v5", "v5", "base", "v5"]
    async with engine_with_labels(iter(labels), iter(labels)) as (engine, keys, _):
        for _ in range(5):
            await engine.info()
            await collect(engine, ask(max_new_tokens=1))
    assert keys[1:4] == ["v5", "v5", "base"]
    assert keys[0].startswith("v4-")
    assert keys[4].startswith("v5-")


async def test_a_first_token_of_other_weights_than_the_key_names_is_not_used() -> None:
    """As after another proxy's swap: the prompt may continue a prefix of the weights before."""
    async with engine_with_labels(iter(["v4", "v4", "v5"]), iter(["v5", "v5", "v5"])) as (engine, keys, ids):
        await engine.info()
        request = ask(max_new_tokens=1)
        answer = await collect(engine, request)
    assert answer.spans == (LabelSpan(label="v5", start=0, end=1),)
    assert keys[2:] == ["v5"]
    assert [key.partition("-")[0] for key in keys[:2]] == ["v4", "v4"]
    assert not any(one != other and other.startswith(one) for one in ids for other in ids)


async def test_weights_that_never_settle_end_the_request() -> None:
    labels = (f"v{number}" for number in itertools.count())
    async with engine_with_labels(labels, itertools.repeat("other")) as (engine, keys, _):
        await engine.info()
        with pytest.raises(EngineUnavailable, match="before the answer's first token"):
            await collect(engine, ask(max_new_tokens=1))
    assert len(keys) == 32
