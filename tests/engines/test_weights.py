"""Weights replaced while an engine serves."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from safetensors.torch import load_file, save

from proxy.contract.delta import is_delta
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from proxy.engines.launch import SGLANG_SHIM
from proxy.engines.protocol import EngineFinish, LabelSpan, PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.errors import EngineFailed
from proxy.serving.offers import join
from proxy.versions.inspector import WeightsInspector
from proxy.versions.tensor_digests import TensorDigests
from tests.engines.conftest import Models, Reference, Server, sglang_venv
from tests.engines.generating import PROMPT, Answer, ask, collect, gather, open_stream
from trainer.config import CollectiveWeights, DeltaWeights, TensorsWeights
from trainer.publish.collective import CollectivePublisher
from trainer.publish.delta import DeltaPublisher
from trainer.publish.tensors import TensorsPublisher

LONG = 300


async def swap_in_the_middle(engine: SglangEngine, models: Models, mode: PauseMode) -> Answer:
    """Return a streamed answer begun by model a; the swap to b happens after its first chunk."""
    stream = open_stream(engine, ask(stream=True, max_new_tokens=LONG))
    chunks = [await anext(stream)]
    await engine.pause(mode)
    await engine.load_weights(str(models.b), "b")
    await engine.resume()
    chunks += [chunk async for chunk in stream]
    return gather(chunks)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_swap_during_a_request_splits_its_spans(
    engine: SglangEngine, models: Models, reference: Reference, mode: PauseMode
) -> None:
    answer = await swap_in_the_middle(engine, models, mode)
    assert answer.finish is EngineFinish.LENGTH
    assert len(answer.ids) == len(answer.logprobs) == LONG
    first, second = answer.spans
    assert (first.label, second.label) == ("a", "b")
    assert (first.start, second.start, second.end) == (0, first.end, LONG)
    before = answer.ids[: first.end]
    assert before == reference.greedy_after(PROMPT, before)


async def test_retracted_requests_continue_as_if_computed_by_the_new_weights(
    engine: SglangEngine, models: Models, server: Server, reference_b: Reference
) -> None:
    answer = await swap_in_the_middle(engine, models, PauseMode.RETRACT)
    swap = answer.spans[0].end
    expected = reference_b.of_output(PROMPT, answer.ids)
    assert answer.logprobs[swap:] == pytest.approx(expected[swap:], abs=server.exactness)


async def test_abort_mode_ends_requests_with_what_they_have(engine: SglangEngine) -> None:
    stream = open_stream(engine, ask(stream=True, max_new_tokens=LONG))
    chunks = [await anext(stream)]
    await engine.pause(PauseMode.ABORT)
    await engine.resume()
    answer = gather(chunks + [chunk async for chunk in stream])
    assert answer.finish is EngineFinish.ABORT
    assert 0 < len(answer.ids) < LONG


async def test_after_a_swap_new_requests_are_wholly_of_the_new_weights(
    engine: SglangEngine, models: Models, server: Server, reference_b: Reference
) -> None:
    # The same prompt before and after: a prefix computed with the old weights must not be reused.
    await collect(engine, ask())
    await engine.pause(PauseMode.IN_PLACE)
    waiting = asyncio.create_task(collect(engine, ask()))
    _, pending = await asyncio.wait([waiting], timeout=0.2)
    assert pending
    await engine.load_weights(str(models.b), "b")
    await engine.resume()
    for answer in (await waiting, await collect(engine, ask())):
        assert answer.ids == reference_b.greedy(PROMPT, 16)
        assert answer.logprobs == pytest.approx(reference_b.of_output(PROMPT, answer.ids), abs=server.exactness)
        assert answer.spans == (LabelSpan(label="b", start=0, end=16),)
    info = await engine.info()
    assert (info.model_path, info.weight_label) == (str(models.b), "b")


async def test_versions_in_bfloat16_are_served_from_shards_and_from_differences(
    engine: SglangEngine, models: Models, server: Server, tmp_path: Path
) -> None:
    settings = DeltaWeights.model_validate({"directory": tmp_path / "weights", "dtype": "bfloat16"})
    publisher = DeltaPublisher(settings, models.b)
    publisher.shard_bytes = 100_000
    inspector = WeightsInspector(tmp_path / "weights", tmp_path / "cache", 10**9)
    head = Head(run_id=RunId("run_x"), run_name="x", version=0, base_model=str(models.b), weights=None)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(models.b / "model.safetensors").items()}
    for version in (1, 2):
        tensors = {name: tensor * (1 + version / 64) for name, tensor in tensors.items()}
        staged = publisher.stage(head, tensors, None)
        publisher.settle(staged)
        head = msgspec.structs.replace(head, version=version, weights=staged.weights)
        assert is_delta(staged.weights) is (version == 2)
        await inspector.check(staged.weights, str(models.b))
        path = inspector.path_of(staged.weights)
        assert len(list(Path(path).glob("*.safetensors"))) > 1
        await engine.pause(PauseMode.IN_PLACE)
        await engine.load_weights(path, f"version {version}")
        await engine.resume()
        answer = await collect(engine, ask())
        assert answer.spans == (LabelSpan(label=f"version {version}", start=0, end=16),)
        expected = Reference(Path(path)).of_output(PROMPT, answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=server.exactness)
    await inspector.aclose()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="base-rl-test-", dir="/dev/shm") as made:
        yield Path(made)


async def test_versions_are_served_from_memory_before_they_are_on_the_disk(
    engine: SglangEngine, models: Models, server: Server, shared_memory: Path, tmp_path: Path
) -> None:
    settings = TensorsWeights(directory=tmp_path / "weights", memory_directory=shared_memory)
    publisher = TensorsPublisher(settings, models.b)
    publisher.shard_bytes = 100_000
    inspector = WeightsInspector(tmp_path / "weights", memory=shared_memory)
    head = Head(run_id=RunId("run_x"), run_name="x", version=0, base_model=str(models.b), weights=None)
    tensors = load_file(models.b / "model.safetensors")
    for version in (1, 2):
        tensors = {name: tensor * (1 + version / 64) for name, tensor in tensors.items()}
        staged = publisher.stage(head, tensors, None)
        assert staged.save is not None
        assert not Path(staged.weights.uri).exists()
        await inspector.check_in_memory(staged.weights, str(models.b))
        copy = inspector.in_memory(staged.weights)
        assert copy is not None
        await engine.pause(PauseMode.IN_PLACE)
        await engine.load_weights(copy.uri, f"version {version}")
        await engine.resume()
        saved = staged.save(0)
        publisher.settle(saved)
        head = msgspec.structs.replace(head, version=version, weights=saved.weights)
        publisher.close()  # the engine needs the copy no more
        assert not Path(copy.uri).exists()
        await inspector.check(saved.weights, str(models.b))
        answer = await collect(engine, ask())
        assert answer.spans == (LabelSpan(label=f"version {version}", start=0, end=16),)
        expected = Reference(Path(saved.weights.uri)).of_output(PROMPT, answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=server.exactness)
    await inspector.aclose()


async def test_versions_are_received_from_the_trainer_before_they_are_on_the_disk(
    engine: SglangEngine, models: Models, server: Server, tmp_path: Path
) -> None:
    settings = CollectiveWeights.model_validate({"directory": tmp_path / "weights", "dtype": "float32"})
    publisher = CollectivePublisher(settings, models.b, proxy_url="http://127.0.0.1:8080")
    inspector = WeightsInspector(tmp_path / "weights", senders=("127.0.0.1",))
    head = Head(run_id=RunId("run_x"), run_name="x", version=0, base_model=str(models.b), weights=None)
    tensors = load_file(models.b / "model.safetensors")
    for version in (1, 2):
        tensors = {name: tensor * (1 + version / 64) for name, tensor in tensors.items()}
        staged = publisher.stage(head, tensors, None)
        assert staged.save is not None
        assert staged.offer is not None
        await inspector.check_offer(staged.weights, staged.offer, str(models.b))
        place = await join(staged.offer, (await engine.info()).ranks)
        await engine.pause(PauseMode.IN_PLACE)
        await engine.receive_weights(place, staged.offer, f"version {version}")
        await engine.resume()
        answer = await collect(engine, ask())
        assert answer.spans == (LabelSpan(label=f"version {version}", start=0, end=16),)
        assert not Path(staged.weights.uri).exists()
        saved = staged.save(1)
        publisher.settle(saved)
        head = msgspec.structs.replace(head, version=version, weights=saved.weights)
        await inspector.check(saved.weights, str(models.b))
        expected = Reference(Path(saved.weights.uri)).of_output(PROMPT, answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=server.exactness)
    publisher.close()
    await inspector.aclose()


async def test_checksums_are_those_of_the_files(engine: SglangEngine, models: Models) -> None:
    await engine.pause(PauseMode.IN_PLACE)
    await engine.load_weights(str(models.b), "b")
    await engine.resume()
    sums = await engine.checksums()
    digests, others = TensorDigests(models.b), TensorDigests(models.a)
    equal = {name for name, each in sums.items() if digests.digest(name) == each}
    # SGLang pads the vocabulary, and its checksums there are its own.
    assert {name for name in sums if "embed_tokens" not in name and "lm_head" not in name} <= equal
    assert any("q_proj" in name or "qkv_proj" in name for name in equal)
    assert not {name for name in equal if "_proj" in name and others.digest(name) == sums[name]}


async def test_a_failing_update_keeps_the_old_weights(
    engine: SglangEngine, models: Models, reference: Reference, tmp_path: Path
) -> None:
    await engine.pause(PauseMode.IN_PLACE)
    with pytest.raises(EngineFailed):
        await engine.load_weights(str(tmp_path / "nothing"), "c")
    await engine.resume()
    answer = await collect(engine, ask())
    assert answer.ids == reference.greedy(PROMPT, 16)
    assert answer.spans == (LabelSpan(label="a", start=0, end=16),)
    assert (await engine.info()).weight_label == "a"


async def test_labelling_keeps_requests_and_splits_their_spans(engine: SglangEngine, reference: Reference) -> None:
    stream = open_stream(engine, ask(stream=True, max_new_tokens=LONG))
    chunks = [await anext(stream)]
    await engine.label_weights("renamed")
    answer = gather(chunks + [chunk async for chunk in stream])
    assert len(answer.ids) == LONG
    assert answer.ids == reference.greedy_after(PROMPT, answer.ids)
    assert answer.finish is EngineFinish.LENGTH
    assert [span.label for span in answer.spans] == ["a", "renamed"]
    assert (await engine.info()).weight_label == "renamed"


async def send_embedded(http: httpx.AsyncClient, model: Path, label: str) -> None:
    blob = base64.b64encode(save(load_file(model / "model.safetensors"))).decode()
    body = {"serialized_named_tensors": [blob], "weight_version": label}
    assert (await http.post("/begin_weight_update", json={})).status_code == httpx.codes.OK
    assert (await http.post("/update_weights_from_tensor", json=body)).status_code == httpx.codes.OK
    assert (await http.post("/end_weight_update", json={})).status_code == httpx.codes.OK


async def send_sglang(url: str, model: Path, label: str) -> None:
    """Send tensors in SGLang's own serialised form, which only a process with SGLang can write."""
    sender = await asyncio.create_subprocess_exec(
        str(sglang_venv() / "bin" / "python"),
        str(Path(__file__).parent / "send_tensors.py"),
        *(url, str(model), label),
        env={**os.environ, "PYTHONPATH": str(SGLANG_SHIM), "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert await sender.wait() == 0


async def test_weights_from_memory(
    engine: SglangEngine, http: httpx.AsyncClient, models: Models, server: Server, reference_b: Reference
) -> None:
    if server.kind == "embedded":
        await send_embedded(http, models.b, "memory")
    else:
        await send_sglang(server.url, models.b, "memory")
    answer = await collect(engine, ask())
    assert answer.ids == reference_b.greedy(PROMPT, 16)
    assert [span.label for span in answer.spans] == ["memory"]


async def test_weights_from_memory_need_an_open_update(
    engine: SglangEngine, http: httpx.AsyncClient, server: Server
) -> None:
    if server.kind == "sglang":
        pytest.skip(
            "SGLang unpickles before it looks whether an update is open: there is no safe body to try it with"
        )
    reply = await http.post("/update_weights_from_tensor", json={"serialized_named_tensors": []})
    assert reply.status_code == httpx.codes.BAD_REQUEST
    assert reply.json()["success"] is False
