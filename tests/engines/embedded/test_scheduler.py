"""The model thread without HTTP: batches that grow, shrink and are preempted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from proxy.engines.embedded.generation import Generation
from proxy.engines.embedded.model import ModelUnsupported, ServedModel
from proxy.engines.embedded.scheduler import Scheduler
from proxy.engines.embedded.weights import WeightsRefused, read_directory, read_serialized
from tests.engines.conftest import Models, Reference
from tests.engines.embedded.test_sampling import rules
from tests.engines.generating import END_ID, NEVER_END

BIAS = ((END_ID, NEVER_END[str(END_ID)]),)


@asynccontextmanager
async def running(
    models: Models, *, max_running: int = 64, max_total_tokens: int = 65536
) -> AsyncIterator[Scheduler]:
    model = ServedModel(str(models.a), device="cpu", dtype="float32", seed=0, max_total_tokens=max_total_tokens)
    scheduler = Scheduler(
        model,
        weight_label="a",
        max_running=max_running,
        max_total_tokens=max_total_tokens,
        loop=asyncio.get_running_loop(),
    )
    scheduler.start()
    try:
        yield scheduler
    finally:
        await asyncio.to_thread(scheduler.close)


def generation(prompt: list[int], count: int, notify: Callable[[], None]) -> Generation:
    return Generation(
        rid="",
        prompt=prompt,
        rules=rules(greedy=True, max_new_tokens=count, logit_bias=BIAS),
        stop_ids=frozenset(),
        stop_strings=None,
        grammar=None,
        stream=False,
        notify=notify,
    )


async def generate(scheduler: Scheduler, prompt: list[int], count: int) -> Generation:
    done = asyncio.Event()
    request = generation(prompt, count, done.set)
    scheduler.add(request)
    await done.wait()
    return request


async def check_all(scheduler: Scheduler, reference: Reference, sizes: list[tuple[int, int]]) -> list[Generation]:
    prompts = [[(7 * index + step) % 250 for step in range(size)] for index, (size, _) in enumerate(sizes)]
    tasks = [generate(scheduler, prompt, count) for prompt, (_, count) in zip(prompts, sizes, strict=True)]
    done = await asyncio.gather(*tasks)
    for prompt, request in zip(prompts, done, strict=True):
        assert tuple(request.output) == reference.greedy(tuple(prompt), len(request.output))
        expected = reference.of_output(tuple(prompt), tuple(request.output))
        assert request.logprobs == pytest.approx(expected, abs=1e-4)
    return done


async def test_the_cache_grows_with_rows_and_lengths(models: Models, reference: Reference) -> None:
    async with running(models) as scheduler:
        await check_all(scheduler, reference, [(5, 4)])
        await check_all(scheduler, reference, [(3 + index, 5 + index % 7) for index in range(30)])
        await check_all(scheduler, reference, [(150, 10), (2, 90), (70, 3)])


async def test_more_requests_than_slots_wait_their_turn(models: Models, reference: Reference) -> None:
    async with running(models, max_running=3) as scheduler:
        await check_all(scheduler, reference, [(4, 6 + index) for index in range(10)])


async def test_requests_step_back_when_the_cache_is_full_and_come_again(models: Models, reference: Reference) -> None:
    async with running(models, max_total_tokens=120) as scheduler:
        done = await check_all(scheduler, reference, [(10, 40), (10, 40), (10, 40), (10, 40)])
    assert any(request.retractions for request in done)


async def test_a_step_that_fails_fails_its_requests_and_not_the_engine(
    models: Models, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    async with running(models) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.model, "step", broken)
            failed = await generate(scheduler, [1, 2, 3], 5)
        assert failed.failure is not None
        assert "out of memory" in failed.failure
        await check_all(scheduler, reference, [(4, 5)])


async def test_closing_ends_what_runs(models: Models) -> None:
    async with running(models) as scheduler:
        scheduler.pause("in_place")
        waiting = asyncio.create_task(generate(scheduler, [1, 2], 5))
        await asyncio.wrap_future(scheduler.submit(lambda: None))
    finish = (await waiting).finish
    assert finish is not None
    assert finish["type"] == "abort"


def served(models: Models) -> ServedModel:
    return ServedModel(str(models.a), device="cpu", dtype="float32", seed=0, max_total_tokens=1000)


def test_weights_that_do_not_fit_change_nothing(models: Models, tmp_path: Path) -> None:
    model = served(models)
    before = {name: tensor.clone() for name, tensor in model.network.state_dict().items()}
    good = load_file(models.b / "model.safetensors")
    missing = dict(list(good.items())[1:])
    for name, wrong, words in [
        ("shapes", load_file(models.broken / "model.safetensors"), "other shapes"),
        ("missing", missing, "missing"),
        ("unknown", {**good, "extra.weight": torch.zeros(1)}, r"no tensors called extra\.weight"),
        ("untied", {**good, "lm_head.weight": torch.zeros_like(good["model.embed_tokens.weight"])}, "one tensor"),
    ]:
        (tmp_path / name).mkdir()
        save_file(wrong, tmp_path / name / "model.safetensors")
        with pytest.raises(WeightsRefused, match=words):
            model.prepare(read_directory(str(tmp_path / name)), complete=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.network.state_dict().items())


def test_new_weights_are_exchanged_without_a_copy_and_tied_ones_stay_tied(models: Models) -> None:
    model = served(models)
    embedding, file = model.network.get_input_embeddings().weight, models.b / "model.safetensors"
    good, before, numbers = load_file(file), embedding.detach(), embedding.detach().clone()
    weights = model.prepare(read_directory(str(models.b)), complete=True)
    assert torch.equal(embedding, numbers), "the model computes with its own until `put`"
    weights.put()
    assert torch.equal(before, numbers), "nothing was copied into the old memory"
    assert model.network.get_input_embeddings().weight is model.network.lm_head.weight is embedding
    own = model.network.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in good.items())
    weights.release()
    part = model.prepare({"lm_head.weight": before.double()}, complete=False)
    part.put()
    assert torch.equal(embedding, numbers)
    assert embedding.dtype is torch.float32


def test_directories_and_texts_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match=r"no \*\.safetensors"):
        read_directory(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00nothing")
    with pytest.raises(WeightsRefused, match="cannot read"):
        read_directory(str(tmp_path))
    for blob in ("?", "gASVCgAAAAAAAABdlChLAUsCZS4="):
        with pytest.raises(WeightsRefused, match="safetensors"):
            read_serialized([blob])


def test_a_model_with_other_layers_is_refused(models: Models, tmp_path: Path) -> None:
    config = json.loads((models.a / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention"]
    for file in models.a.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match="linear_attention"):
        ServedModel(str(tmp_path), device="cpu", dtype="float32", seed=0, max_total_tokens=1000)


def test_spans_follow_the_labels() -> None:
    request = generation([1], 5, lambda: None)
    for label in ("a", "a", "b", "c", "c"):
        request.accept(3, -0.5, label)
    assert msgspec.to_builtins(request.spans.to_wire()) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
        {"version": "c", "start": 3, "end": 5},
    ]
    assert request.finish == {"type": "length", "length": 5}
