"""The calls by which an engine receives weights from a trainer through a process group, in SGLang's order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Protocol

from proxy.cancellation import despite_cancellation
from proxy.contract.exchange import Offer, Place, SentTensor
from proxy.engines.descriptions import ServerInfo
from proxy.errors import BaseRlError, EngineFailed

RECEIVING_LABEL = "receiving@0"
"""The label of an engine's weights while buckets replace them one by one. It has the form of a version's label, so
that the engine is never taken for one with its base model, and names no run, so that no version is taken for served.
It stays if the transfer breaks, until weights are loaded whole."""

# Longest attempt to connect to the trainer.
_CONNECT_SECONDS = 5.0
# Longest wait for the engine to leave a group or to end an update that has failed. An engine that still waits for a
# silent trainer answers neither, and the caller should learn why the transfer failed.
_LEAVE_SECONDS = 10.0


class Control(Protocol):
    """Send a control call. Raises EngineFailed if the engine refuses, EngineUnavailable, EngineTimeout."""

    def __call__(self, path: str, body: dict[str, Any], seconds: float = ...) -> Awaitable[None]: ...


async def receive(
    control: Control, server: ServerInfo, place: Place, offer: Offer, *, label: str, flush_cache: bool
) -> EngineFailed | None:
    """Have the engine join the group, receive all buckets and serve them under `label`, and leave the group.

    The engine leaves the group and ends the update after failures and cancellations too. Returns the refusal of the
    last bucket: SGLang also refuses if it has updated its weights and only could not flush its cache, so the label
    that it serves decides. Raises like `control` for everything else.
    """
    if server.pp_size * server.dp_size > 1:
        # SGLang gives each process the rank of its tensor parallel part, so several processes would be one rank, and
        # the group would wait for the others.
        raise EngineFailed("SGLang receives weights from a trainer only with --pp-size 1 and --dp-size 1")
    await _require_listener(place)
    has_ended = False
    try:
        await control("/init_weights_update_group", _membership(place, offer, server.ranks))
        await control("/begin_weight_update", {})
        if not server.loads_between_steps:
            await control("/update_weight_version", {"new_version": RECEIVING_LABEL, "abort_all_requests": False})
        for bucket in offer.buckets[:-1]:
            await control("/update_weights_from_distributed", _update(place, bucket, None, flush_cache=False))
        last = _update(place, offer.buckets[-1] if offer.buckets else (), label, flush_cache=flush_cache)
        try:
            await control("/update_weights_from_distributed", last)
        except EngineFailed as refusal:
            return refusal
        await control("/end_weight_update", {})
        has_ended = True
        return None
    finally:
        await despite_cancellation(_leave(control, place, is_updating=not has_ended))


async def _require_listener(place: Place) -> None:
    """Raise EngineFailed unless the trainer's end of the group can be reached. SGLang would try for half an hour, and
    generate nothing meanwhile; the trainer may have died since it made the group."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(place.host, place.port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_CONNECT_SECONDS:g} s"
        raise EngineFailed(f"the trainer cannot be reached at {place.host}:{place.port}: {reason}") from error
    writer.close()


def _membership(place: Place, offer: Offer, ranks: int) -> dict[str, Any]:
    return {
        "master_address": place.host,
        "master_port": place.port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": place.group,
        "backend": offer.backend.value,
    }


def _update(place: Place, bucket: tuple[SentTensor, ...], label: str | None, *, flush_cache: bool) -> dict[str, Any]:
    return {
        "names": [tensor.name for tensor in bucket],
        "dtypes": [tensor.dtype for tensor in bucket],
        "shapes": [tensor.shape for tensor in bucket],
        "group_name": place.group,
        "weight_version": label,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }


async def _leave(control: Control, place: Place, *, is_updating: bool) -> None:
    if is_updating:
        with contextlib.suppress(BaseRlError):  # the first failure has the reason, and is being raised
            await control("/end_weight_update", {}, seconds=_LEAVE_SECONDS)
    with contextlib.suppress(BaseRlError):  # SGLang's groups have new names each, so a group that stays is harmless
        await control("/destroy_weights_update_group", {"group_name": place.group}, seconds=_LEAVE_SECONDS)
