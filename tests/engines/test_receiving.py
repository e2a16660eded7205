"""Weights that a trainer sends through a process group, without a file."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from proxy.contract.exchange import Offer, Place
from proxy.contract.policy import parse_weight_label
from proxy.engines.protocol import EngineFinish, LabelSpan, PauseMode
from proxy.engines.receiving import RECEIVING_LABEL
from proxy.engines.sglang import SglangEngine
from proxy.errors import EngineFailed
from tests.engines.conftest import Models, Reference, Server
from tests.engines.generating import PROMPT, ask, collect, gather, open_stream
from tests.engines.weight_sender import HOST, WeightSender, offer_of

LONG = 300
LAYER = "model.layers.1.self_attn.o_proj.weight"
Tensors = dict[str, torch.Tensor]


def tensors_of(model: Path) -> Tensors:
    return load_file(model / "model.safetensors")


@asynccontextmanager
async def standing_still(engine: SglangEngine) -> AsyncIterator[None]:
    """Pause the engine in this block if it cannot receive weights while it generates."""
    if (await engine.info()).loads_between_steps:
        yield
        return
    await engine.pause(PauseMode.IN_PLACE)
    try:
        yield
    finally:
        await engine.resume()


async def deliver(
    engine: SglangEngine, tensors: Mapping[str, torch.Tensor], label: str, offer: Offer | None = None
) -> None:
    async with standing_still(engine), WeightSender().sending(tensors) as place:
        await engine.receive_weights(place, offer or offer_of(tensors), label)


async def check_untouched(engine: SglangEngine, reference: Reference) -> None:
    assert (await engine.info()).weight_label == "a"
    answer = await collect(engine, ask())
    assert answer.ids == reference.greedy(PROMPT, 16)
    assert answer.spans == (LabelSpan(label="a", start=0, end=16),)


@pytest.mark.parametrize("per_bucket", [1000, 3])
async def test_received_weights_are_those_of_the_file(
    engine: SglangEngine, models: Models, reference_b: Reference, server: Server, per_bucket: int
) -> None:
    await engine.load_weights(str(models.b), "from a file")
    expected = await engine.checksums()
    await engine.load_weights(str(models.a), "a")
    assert await engine.checksums() != expected
    tensors = tensors_of(models.b)
    await deliver(engine, tensors, "sent", offer_of(tensors, per_bucket=per_bucket))
    assert expected
    assert await engine.checksums() == expected
    assert (await engine.info()).weight_label == "sent"
    answer = await collect(engine, ask())
    assert answer.ids == reference_b.greedy(PROMPT, 16)
    assert answer.logprobs == pytest.approx(reference_b.of_output(PROMPT, answer.ids), abs=server.exactness)
    assert answer.spans == (LabelSpan(label="sent", start=0, end=16),)


async def test_a_running_request_continues_with_the_received_weights(
    engine: SglangEngine, models: Models, reference: Reference
) -> None:
    stream = open_stream(engine, ask(stream=True, max_new_tokens=LONG))
    chunks = [await anext(stream)]
    tensors = tensors_of(models.b)
    await deliver(engine, tensors, "sent", offer_of(tensors, per_bucket=5))
    chunks += [chunk async for chunk in stream]
    answer = gather(chunks)
    assert answer.finish is EngineFinish.LENGTH
    assert len(answer.ids) == LONG
    first, second = answer.spans
    assert (first.label, second.label) == ("a", "sent")
    assert (first.start, second.start, second.end) == (0, first.end, LONG)
    before = answer.ids[: first.end]
    assert before == reference.greedy_after(PROMPT, before)


async def test_numbers_of_another_dtype_are_converted(
    engine: SglangEngine, models: Models, server: Server, tmp_path: Path
) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in tensors_of(models.b).items()}
    await deliver(engine, narrow, "narrow")
    answer = await collect(engine, ask())
    network = Reference(models.b)
    network.network.load_state_dict({name: tensor.float() for name, tensor in narrow.items()}, strict=False)
    assert answer.logprobs == pytest.approx(network.of_output(PROMPT, answer.ids), abs=server.exactness)
    assert answer.ids == network.greedy(PROMPT, 16)


@asynccontextmanager
async def trainer_that_dies(model: Path, count: int) -> AsyncIterator[tuple[Place, asyncio.Task[None]]]:
    """Run a trainer that is killed when it has sent `count` tensors; the task ends then."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.engines.weight_sender", str(model), "group-of-the-dead", str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output = process.stdout
    assert output is not None

    async def kill_when_sent() -> None:
        assert await output.readline() == b"sent\n"
        process.kill()

    try:
        place = Place(host=HOST, port=int(await output.readline()), group="group-of-the-dead")
        killing = asyncio.create_task(kill_when_sent())
        yield place, killing
        await killing
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_trainer_that_dies_leaves_no_version_that_is_a_mixture(
    engine: SglangEngine, models: Models, server: Server, reference: Reference, reference_b: Reference
) -> None:
    offer = offer_of(tensors_of(models.b), per_bucket=2)
    for _ in range(2):  # the group of the first one is gone, so its name is free
        async with standing_still(engine), trainer_that_dies(models.b, 9) as (place, _):
            with pytest.raises(EngineFailed, match=r"did not come|Failed to receive"):
                await engine.receive_weights(place, offer, "sent")
    if server.kind == "embedded":
        await check_untouched(engine, reference)
    else:
        assert (await engine.info()).weight_label == RECEIVING_LABEL
        assert [span.label for span in (await collect(engine, ask())).spans] == [RECEIVING_LABEL]
    await engine.pause(PauseMode.IN_PLACE)
    await engine.load_weights(str(models.a), "a")
    await engine.resume()
    await check_untouched(engine, reference)
    await deliver(engine, tensors_of(models.b), "sent")
    assert (await collect(engine, ask())).ids == reference_b.greedy(PROMPT, 16)


async def test_a_request_survives_the_death_of_the_trainer(
    engine: SglangEngine, models: Models, server: Server
) -> None:
    stream = open_stream(engine, ask(stream=True, max_new_tokens=LONG))
    chunks = [await anext(stream)]
    async with standing_still(engine), trainer_that_dies(models.b, 3) as (place, _):
        with pytest.raises(EngineFailed):
            await engine.receive_weights(place, offer_of(tensors_of(models.b)), "sent")
    chunks += [chunk async for chunk in stream]
    answer = gather(chunks)
    assert (answer.finish, len(answer.ids)) == (EngineFinish.LENGTH, LONG)
    labels = [span.label for span in answer.spans]
    assert labels == (["a"] if server.kind == "embedded" else ["a", RECEIVING_LABEL])


async def test_a_cancelled_transfer_leaves_the_group(
    engine: SglangEngine, models: Models, server: Server, reference: Reference, reference_b: Reference
) -> None:
    tensors = tensors_of(models.b)
    sender = WeightSender()
    async with standing_still(engine):
        receiving = asyncio.create_task(engine.receive_weights(sender.place, offer_of(tensors, per_bucket=1), "sent"))
        await asyncio.to_thread(sender.join)
        await asyncio.to_thread(sender.broadcast, list(tensors.values())[:3])
        receiving.cancel()
        # SGLang waits for the bucket that it receives, and leaves then.
        sender.close()
        with pytest.raises(asyncio.CancelledError):
            await receiving
    if server.kind == "embedded":
        await check_untouched(engine, reference)
    else:
        assert (await engine.info()).weight_label == RECEIVING_LABEL
    await deliver(engine, tensors, "sent")
    assert (await collect(engine, ask())).ids == reference_b.greedy(PROMPT, 16)


async def test_a_tensor_of_another_shape_is_refused(
    engine: SglangEngine, models: Models, server: Server, reference: Reference
) -> None:
    # SGLang pads or cuts the tensors of linear layers, and takes them in silence; those of norms it compares.
    tensors = {**tensors_of(models.b), "model.norm.weight": torch.ones(32)}
    with pytest.raises(EngineFailed):
        await deliver(engine, tensors, "sent", offer_of(tensors, per_bucket=4))
    if server.kind == "embedded":
        await check_untouched(engine, reference)
    else:
        assert (await engine.info()).weight_label == RECEIVING_LABEL


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != LAYER}


def renamed(tensors: Tensors) -> Tensors:
    return {f"x.{name}": tensor for name, tensor in tensors.items()}


def of_another_shape(tensors: Tensors) -> Tensors:
    return {**tensors, LAYER: torch.ones(64, 32)}


def not_finite(tensors: Tensors) -> Tensors:
    tensors[LAYER][3, 5] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_a_layer, "o_proj.weight is missing"),
        (renamed, "has no tensors called"),
        (of_another_shape, r"o_proj.weight \(\[64, 32\] instead of \[64, 128\]\)"),
        (not_finite, "not finite"),
    ],
)
@pytest.mark.parametrize("server", ["embedded"], indirect=True)
async def test_the_embedded_engine_refuses_bad_weights_whole(
    engine: SglangEngine, models: Models, reference: Reference, spoil: object, reason: str
) -> None:
    assert callable(spoil)
    with pytest.raises(EngineFailed, match=reason):
        await deliver(engine, spoil(tensors_of(models.b)), "sent")
    await check_untouched(engine, reference)


async def test_a_transfer_ends_an_update_that_was_left_open(
    engine: SglangEngine, http: httpx.AsyncClient, models: Models, reference_b: Reference
) -> None:
    """As after the death of a proxy in the middle of a transfer."""
    assert (await http.post("/begin_weight_update", json={})).status_code == httpx.codes.OK
    tensors = tensors_of(models.b)
    with pytest.raises(EngineFailed, match=r"already"):
        await deliver(engine, tensors, "sent")
    await deliver(engine, tensors, "sent")
    assert (await collect(engine, ask())).ids == reference_b.greedy(PROMPT, 16)


def test_the_label_in_between_names_a_version_of_no_run() -> None:
    parsed = parse_weight_label(RECEIVING_LABEL)
    assert parsed is not None
    assert not parsed[0].startswith("run_")
