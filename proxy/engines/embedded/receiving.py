"""Weights that a trainer sends through a process group: SGLang's endpoints, and the tensors that have come so far.

The trainer is rank 0 of a group and this process one of the others. Tensors are kept aside until the update ends, so
that a transfer that breaks leaves the served weights as they are.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.engines.common.http import decode, outcome
from proxy.engines.common.wire import RequestRefused
from proxy.engines.embedded.weights import WeightsRefused
from proxy.engines.embedded.wire import DistributedUpdate, GroupJoin, GroupLeave
from proxy.process_groups import WeightGroup

# Longest wait for the other ranks of a group, and for each tensor: less than the proxy waits for an answer, so that
# it learns the reason.
_PATIENCE_SECONDS = 60.0

_Result = TypeVar("_Result")


class StagedWeights:
    """The tensors of one update so far, and the label that came with the last of them. `is_receiving` while a bucket
    comes. `fault` is why they cannot become whole; None as long as they can."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.label: str | None = None
        self.is_receiving = False
        self.fault: str | None = None

    def add(self, tensors: Mapping[str, torch.Tensor], label: str | None) -> None:
        """Keep the tensors of a bucket."""
        self.tensors.update(tensors)
        self.label = label if label is not None else self.label

    def spoil(self, fault: str) -> None:
        """Drop all tensors, because a bucket is lost."""
        self.tensors.clear()
        self.fault = fault

    def checked(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors. Raises WeightsRefused if a number is not finite."""
        wrong = [name for name, tensor in self.tensors.items() if not torch.isfinite(tensor).all()]
        if wrong:
            raise WeightsRefused(f"the tensor {wrong[0]} has numbers that are not finite")
        return self.tensors


class WeightReceiver:
    """The process groups that this engine has joined, and what it received through them in the current update.

    `is_updating` returns whether an update has begun, `abort_all` ends all requests. Everything but the waits for
    other ranks runs in the event loop.
    """

    def __init__(
        self,
        is_updating: Callable[[], bool],
        *,
        abort_all: Callable[[], Awaitable[None]],
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._is_updating = is_updating
        self._abort_all = abort_all
        self._patience_seconds = patience_seconds
        # None while the group is being joined.
        self._groups: dict[str, WeightGroup | None] = {}
        self._staged = StagedWeights()

    def routes(self) -> list[Route]:
        """Return SGLang's endpoints of these groups."""
        return [
            Route("/init_weights_update_group", self._init, methods=["POST"]),
            Route("/update_weights_from_distributed", self._update, methods=["POST"]),
            Route("/destroy_weights_update_group", self._destroy, methods=["POST"]),
        ]

    def take(self) -> StagedWeights | None:
        """End the update: return the weights that came in it, None if there are none.

        Raises WeightsRefused, with everything dropped, if a bucket was lost or is still being received.
        """
        staged, self._staged = self._staged, StagedWeights()
        if staged.is_receiving:
            raise WeightsRefused("a bucket is still being received")
        if staged.fault is not None:
            raise WeightsRefused(staged.fault)
        return staged if staged.tensors else None

    async def _init(self, request: Request) -> Response:
        try:
            await self._join(decode(await request.body(), GroupJoin))
        except RequestRefused as error:
            return outcome(success=False, message=f"Failed to initialize custom process group: {error}.")
        return outcome(success=True, message="Succeeded to initialize custom process group.")

    async def _join(self, body: GroupJoin) -> None:
        name = body.group_name
        if name in self._groups:
            raise RequestRefused(f"there is a group {name} already")
        self._groups[name] = None
        try:
            self._groups[name] = await _in_thread(partial(_join, body, self._patience_seconds))
        finally:
            if self._groups[name] is None:
                del self._groups[name]

    async def _update(self, request: Request) -> Response:
        if not self._is_updating():
            return outcome(success=False, message="Call /begin_weight_update first.")
        try:
            body = decode(await request.body(), DistributedUpdate)
            if not len(body.names) == len(body.dtypes) == len(body.shapes):
                raise RequestRefused("names, dtypes and shapes differ in their number.")
            if body.abort_all_requests:
                await self._abort_all()
            await self._receive(body)
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        return outcome(success=True, message="Succeeded to receive the tensors.")

    async def _receive(self, body: DistributedUpdate) -> None:
        group = self._groups.get(body.group_name)
        if group is None:
            raise RequestRefused(f"there is no group {body.group_name}: call /init_weights_update_group first")
        # If the update ends meanwhile, the tensors are dropped: the next one has a stage of its own.
        staged = self._staged
        if staged.is_receiving:
            raise RequestRefused("another bucket is being received")
        staged.is_receiving = True
        try:
            staged.add(await _in_thread(partial(_receive, group, body)), body.weight_version)
        except RequestRefused as error:
            staged.spoil(str(error))
            raise
        finally:
            staged.is_receiving = False

    async def _destroy(self, request: Request) -> Response:
        try:
            name = decode(await request.body(), GroupLeave).group_name
            group = self._groups.get(name)
            if group is None:
                raise RequestRefused("The group to be destroyed does not exist.")
            del self._groups[name]
            await _in_thread(group.close)
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        return outcome(success=True, message="Succeeded to destroy custom process group.")


def _join(body: GroupJoin, seconds: float) -> WeightGroup:
    try:
        own_address = _own_address(body, seconds)
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            body.master_address,
            body.master_port,
            body.world_size,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return WeightGroup(
            store,
            group=body.group_name,
            rank=body.rank_offset,
            size=body.world_size,
            backend=body.backend.value,
            seconds=seconds,
            host=own_address,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestRefused(f"the group did not come about: {_reason(error)}") from error


def _own_address(body: GroupJoin, seconds: float) -> str:
    """Return this machine's address in the trainer's network. By itself, gloo takes that of the machine's name, which
    is often one that only the machine itself can reach."""
    with socket.create_connection((body.master_address, body.master_port), timeout=seconds) as connection:
        address: str = connection.getsockname()[0]
    return address


def _receive(group: WeightGroup, body: DistributedUpdate) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        try:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast([tensors[name]])
        except RuntimeError as error:
            raise WeightsRefused(f"the tensor {name} did not come: {_reason(error)}") from error
    return tensors


def _reason(error: Exception) -> str:
    """Return the first sentence of torch's message, without the line of its source."""
    text = str(error).partition("\n")[0]
    text = text.partition("] ")[2] if text.startswith("[") else text
    return text.partition(". ")[0]


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Run the work in a thread of its own, a daemon: one of the event loop's threads that waits for a silent trainer
    would keep the process from ending."""
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # a cancelled caller then leaves the thread's result unread

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - passed to the caller
            future.set_exception(error)

    threading.Thread(target=run, name="receive", daemon=True).start()
    return await asyncio.wrap_future(future)
