"""The endpoints of process groups without a model: groups that do not come about, and senders that are silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette

from proxy.cli.addresses import random_free_port
from proxy.contract.exchange import Place
from proxy.engines.embedded.receiving import WeightReceiver
from proxy.engines.embedded.weights import WeightsRefused
from tests.engines.weight_sender import HOST, WeightSender

TENSORS = {"first": torch.tensor([1.5, -2.0]), "second": torch.arange(6, dtype=torch.int64).reshape(2, 3)}
PATIENCE = 1.0


class World:
    """A receiver behind HTTP, whose update has begun."""

    def __init__(self, client: httpx.AsyncClient, receiver: WeightReceiver, aborts: list[None]) -> None:
        self.receiver = receiver
        self.aborts = aborts
        self._client = client

    async def post(self, path: str, body: dict[str, Any]) -> str:
        """Return the message of the answer, empty for a success."""
        reply = await self._client.post(path, json=body)
        answer = reply.json()
        assert answer["success"] is (reply.status_code == httpx.codes.OK)
        return "" if answer["success"] else answer["message"]

    async def join(self, place: Place, **more: Any) -> str:
        body = {"master_address": place.host, "master_port": place.port, "rank_offset": 1, "world_size": 2}
        return await self.post("/init_weights_update_group", {**body, "group_name": place.group, **more})

    async def receive(self, group: str, names: list[str], **more: Any) -> str:
        body = {
            "names": names,
            "dtypes": [str(TENSORS[name].dtype).removeprefix("torch.") for name in names],
            "shapes": [list(TENSORS[name].shape) for name in names],
            "group_name": group,
        }
        return await self.post("/update_weights_from_distributed", {**body, **more})

    async def leave(self, group: str) -> str:
        return await self.post("/destroy_weights_update_group", {"group_name": group})


@asynccontextmanager
async def receiving(*, is_updating: Callable[[], bool] = lambda: True) -> AsyncIterator[World]:
    aborts: list[None] = []

    async def abort_all() -> None:
        aborts.append(None)

    receiver = WeightReceiver(is_updating, abort_all=abort_all, patience_seconds=PATIENCE)
    transport = httpx.ASGITransport(Starlette(routes=receiver.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30) as client:
        yield World(client, receiver, aborts)


@asynccontextmanager
async def joined(world: World) -> AsyncIterator[WeightSender]:
    """Yield a sender whose group the receiver has joined."""
    sender = WeightSender()
    _, refusal = await asyncio.gather(asyncio.to_thread(sender.join), world.join(sender.place, backend="gloo"))
    assert not refusal
    yield sender
    sender.close()


async def send(sender: WeightSender, *names: str) -> None:
    await asyncio.to_thread(sender.broadcast, [TENSORS[name] for name in names])


async def test_tensors_are_staged_with_the_last_label() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        for name, label in (("first", "one"), ("second", None)):
            _, refusal = await asyncio.gather(send(sender, name), world.receive(group, [name], weight_version=label))
            assert not refusal
        staged = world.receiver.take()
        assert staged is not None
        assert staged.label == "one"
        assert staged.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(staged.checked()[name], TENSORS[name]) for name in TENSORS)
        assert world.receiver.take() is None
        assert not await world.leave(group)


async def test_a_silent_sender_spoils_the_update() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        _, refusal = await asyncio.gather(send(sender, "first"), world.receive(group, ["first", "second"]))
        assert "the tensor second did not come: Timed out waiting 1000ms" in refusal
        with pytest.raises(WeightsRefused, match="second did not come"):
            world.receiver.take()
        assert world.receiver.take() is None  # of the next update


async def test_a_sender_that_leaves_spoils_the_update() -> None:
    async with receiving() as world, joined(world) as sender:
        waiting = asyncio.create_task(world.receive(sender.place.group, ["first"]))
        sender.close()
        assert "the tensor first did not come" in await waiting
        with pytest.raises(WeightsRefused, match="first did not come"):
            world.receiver.take()


async def test_an_update_that_ends_in_the_middle_of_a_bucket_is_refused() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        waiting = asyncio.create_task(world.receive(group, ["first", "second"]))
        await send(sender, "first")  # has come once the receiver waits
        with pytest.raises(WeightsRefused, match="still being received"):
            world.receiver.take()
        await send(sender, "second")
        assert not await waiting
        assert world.receiver.take() is None


async def test_requests_are_aborted_only_if_asked() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        for abort, count in ((False, 0), (True, 1)):
            received = world.receive(group, ["first"], abort_all_requests=abort)
            _, refusal = await asyncio.gather(send(sender, "first"), received)
            assert not refusal
            assert len(world.aborts) == count


async def test_one_bucket_at_a_time() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        waiting = asyncio.create_task(world.receive(group, ["first", "second"]))
        await send(sender, "first")
        assert "another bucket" in await world.receive(group, ["second"])
        await send(sender, "second")
        assert not await waiting


async def test_a_name_stands_for_one_group() -> None:
    async with receiving() as world, joined(world) as sender:
        assert "already" in await world.join(sender.place, backend="gloo")
        assert not await world.leave(sender.place.group)
        assert "does not exist" in await world.leave(sender.place.group)
        assert "no group" in await world.receive(sender.place.group, ["first"])


async def test_a_group_without_its_trainer_is_refused() -> None:
    async with receiving() as world:
        nobody = Place(host=HOST, port=random_free_port(HOST), group="g")
        refusals = await asyncio.gather(*(world.join(nobody, backend="gloo") for _ in range(2)))
        assert sorted("already" in each for each in refusals) == [False, True]
        assert any("did not come about: Connection refused" in each for each in refusals)
        assert "already" not in await world.join(nobody, backend="gloo")  # the name is free again


async def test_a_trainer_that_does_not_join_its_group_is_not_waited_for() -> None:
    silent = WeightSender()
    async with receiving() as world:
        assert "did not come about: wait timeout after 1000ms" in await world.join(silent.place, backend="gloo")


async def test_wrong_requests_are_refused() -> None:
    async with receiving() as world, joined(world) as sender:
        group = sender.place.group
        assert "backend" in await world.join(Place(host=HOST, port=1, group="h"), backend="carrier pigeon")
        assert "load_format" in await world.receive(group, ["first"], load_format="flattened_bucket")
        assert "dtypes" in await world.receive(group, ["first"], dtypes=["save"])
        assert "differ" in await world.receive(group, ["first"], shapes=[])
        assert "shapes" in await world.receive(group, ["first"], shapes=[[-1]])
        assert "did not come" in await world.receive(group, ["first"], shapes=[[1 << 60]])
    async with receiving(is_updating=lambda: False) as world:
        assert "begin_weight_update" in await world.receive("g", ["first"])
