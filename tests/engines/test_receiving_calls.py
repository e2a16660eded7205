"""The calls by which the adapter has an engine receive weights, with engines that refuse some of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.cli.addresses import random_free_port
from proxy.contract.exchange import Place
from proxy.engines.protocol import PauseMode
from proxy.engines.receiving import RECEIVING_LABEL
from proxy.engines.sglang import SglangEngine
from proxy.errors import EngineFailed
from proxy.settings import EngineSettings
from tests.engines.generating import ask, collect
from tests.engines.test_adapter import reply
from tests.engines.weight_sender import HOST, offer_of
from tests.proxy.calls.world import listening

OFFER = offer_of({name: torch.zeros(2, 3, dtype=torch.bfloat16) for name in "abc"}, per_bucket=2)

INIT = "/init_weights_update_group"
BEGIN = "/begin_weight_update"
NAME = "/update_weight_version"
UPDATE = "/update_weights_from_distributed"
END = "/end_weight_update"
DESTROY = "/destroy_weights_update_group"


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    """A place where something listens, as the trainer's store does."""
    async with await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0) as server:
        yield Place(host=HOST, port=server.sockets[0].getsockname()[1], group="g")


class FakeServer:
    """An engine that records its calls. `refused` are the numbers of calls of a path that it refuses, from 0;
    `flaws` are those that it answers like an error although it does what they ask for."""

    def __init__(self, **description: Any) -> None:
        self.description = description
        self.label = "before"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refused: dict[str, set[int]] = {}
        self.flaws: dict[str, set[int]] = {}
        self.missing: set[str] = set()
        self.prefix_keys: list[str] = []

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for each, body in self.calls if each == path]

    async def control(self, request: Request) -> Response:
        path = request.url.path
        if path in self.missing:
            return Response(status_code=404)
        number = len(self.bodies(path))
        body = await request.json()
        self.calls.append((path, body))
        if number in self.refused.get(path, ()):
            return JSONResponse({"success": False, "message": f"no {path}"}, 400)
        self.label = body.get("new_version") or body.get("weight_version") or self.label
        if number in self.flaws.get(path, ()):
            return JSONResponse({"success": False, "message": "the cache was not flushed"}, 400)
        return JSONResponse({"success": True, "message": "Success"})

    async def generate(self, request: Request) -> Response:
        self.prefix_keys.append((await request.json())["extra_key"])
        answer = reply([7], 1, {"type": "length", "length": 1}, weight_version=self.label)
        return Response(b"data: " + msgspec.json.encode(answer) + b"\n\ndata: [DONE]\n\n")

    @asynccontextmanager
    async def adapter(self) -> AsyncIterator[SglangEngine]:
        async def model_info(_: Request) -> Response:
            return JSONResponse({"model_path": "m", "weight_version": self.label})

        routes = [
            Route("/model_info", model_info),
            Route("/server_info", lambda _: JSONResponse(self.description)),
            Route("/v1/models", lambda _: JSONResponse({"data": []})),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/{name}", self.control, methods=["POST"]),
        ]
        async with listening(Starlette(routes=routes)) as url:
            engine = SglangEngine(url, EngineSettings(url=url))
            yield engine
            await engine.aclose()


async def test_all_ranks_join_and_the_last_bucket_has_the_label(place: Place) -> None:
    server = FakeServer(tp_size=4)
    async with server.adapter() as engine:
        assert (await engine.info()).ranks == 4
        await engine.receive_weights(place, OFFER, "run_x@3")
    assert server.paths == [INIT, BEGIN, NAME, UPDATE, UPDATE, END, DESTROY]
    assert server.bodies(INIT) == [
        {
            "master_address": place.host,
            "master_port": place.port,
            "rank_offset": 1,
            "world_size": 5,
            "group_name": "g",
            "backend": "gloo",
        }
    ]
    assert server.bodies(NAME) == [{"new_version": RECEIVING_LABEL, "abort_all_requests": False}]
    same = {"group_name": "g", "abort_all_requests": False}
    assert server.bodies(UPDATE) == [
        {
            **same,
            "names": ["a", "b"],
            "dtypes": ["bfloat16", "bfloat16"],
            "shapes": [[2, 3], [2, 3]],
            "weight_version": None,
            "flush_cache": False,
        },
        {
            **same,
            "names": ["c"],
            "dtypes": ["bfloat16"],
            "shapes": [[2, 3]],
            "weight_version": "run_x@3",
            "flush_cache": True,
        },
    ]
    assert server.bodies(DESTROY) == [{"group_name": "g"}]


async def test_frozen_requests_keep_their_cache(place: Place) -> None:
    server = FakeServer()
    async with server.adapter() as engine:
        await engine.pause(PauseMode.IN_PLACE)
        await engine.receive_weights(place, OFFER, "run_x@3")
    assert [body["flush_cache"] for body in server.bodies(UPDATE)] == [False, False]


async def test_an_engine_that_keeps_tensors_aside_keeps_its_label_meanwhile(place: Place) -> None:
    server = FakeServer(loads_between_steps=True)
    async with server.adapter() as engine:
        await engine.receive_weights(place, OFFER, "run_x@3")
    assert server.paths == [INIT, BEGIN, UPDATE, UPDATE, END, DESTROY]


@pytest.mark.parametrize(
    ("refused", "label", "calls"),
    [
        ((INIT, 0), "before", [INIT, END, DESTROY]),
        ((BEGIN, 0), "before", [INIT, BEGIN, END, DESTROY]),
        ((UPDATE, 0), RECEIVING_LABEL, [INIT, BEGIN, NAME, UPDATE, END, DESTROY]),
        ((UPDATE, 1), RECEIVING_LABEL, [INIT, BEGIN, NAME, UPDATE, UPDATE, END, DESTROY]),
    ],
)
async def test_after_a_refusal_the_update_ends_and_the_group_is_left(
    place: Place, refused: tuple[str, int], label: str, calls: list[str]
) -> None:
    server = FakeServer()
    path, number = refused
    server.refused[path] = {number}
    async with server.adapter() as engine:
        with pytest.raises(EngineFailed, match=f"no {path}"):
            await engine.receive_weights(place, OFFER, "run_x@3")
    assert (server.paths, server.label) == (calls, label)


async def test_an_update_that_cannot_end_has_failed(place: Place) -> None:
    server = FakeServer(loads_between_steps=True)
    server.refused[END] = {0}
    async with server.adapter() as engine:
        with pytest.raises(EngineFailed, match=f"no {END}"):
            await engine.receive_weights(place, OFFER, "run_x@3")
    assert server.paths[-1] == DESTROY


async def test_the_label_decides_whether_an_engine_that_complains_has_the_weights(place: Place) -> None:
    server = FakeServer()
    server.flaws[UPDATE] = {1}
    async with server.adapter() as engine:
        await engine.receive_weights(place, OFFER, "run_x@3")
    assert (server.paths[-2:], server.label) == ([END, DESTROY], "run_x@3")


async def test_an_engine_is_not_asked_to_wait_for_a_trainer_that_is_gone() -> None:
    server = FakeServer()
    gone = Place(host=HOST, port=random_free_port(HOST), group="g")
    async with server.adapter() as engine:
        with pytest.raises(EngineFailed, match=f"the trainer cannot be reached at {HOST}:{gone.port}"):
            await engine.receive_weights(gone, OFFER, "run_x@3")
    assert server.calls == []


async def test_an_engine_without_the_endpoints_says_so(place: Place) -> None:
    server = FakeServer()
    server.missing = {INIT, BEGIN, UPDATE, END, DESTROY}
    async with server.adapter() as engine:
        with pytest.raises(EngineFailed, match=f"has no endpoint {INIT}"):
            await engine.receive_weights(place, OFFER, "run_x@3")
    assert server.calls == []


@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"dp_size": 2}])
async def test_processes_that_would_share_a_rank_are_not_asked_to_join(place: Place, sizes: dict[str, int]) -> None:
    server = FakeServer(tp_size=2, **sizes)
    async with server.adapter() as engine:
        assert (await engine.info()).ranks == 4
        with pytest.raises(EngineFailed, match="--pp-size 1"):
            await engine.receive_weights(place, OFFER, "run_x@3")
    assert server.calls == []


async def test_a_prefix_of_a_mixture_is_not_used_again(place: Place) -> None:
    """The version before may be loaded again, under the label whose prefixes running requests have extended."""
    server = FakeServer()
    server.refused[UPDATE] = {0}
    async with server.adapter() as engine:
        await engine.info()
        await collect(engine, ask(max_new_tokens=1))
        with pytest.raises(EngineFailed):
            await engine.receive_weights(place, OFFER, "run_x@3")
        server.label = "before"
        await engine.info()
        await collect(engine, ask(max_new_tokens=1))
    before, after = server.prefix_keys
    assert before != after
