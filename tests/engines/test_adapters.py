"""Many LoRA adapters by name over one base model, on every engine. peft computes what is expected."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from safetensors.torch import load_file, save_file

from proxy.engines.protocol import GenerateRequest, LabelSpan
from proxy.engines.sglang import SglangEngine
from proxy.errors import AdapterNotLoaded, EngineFailed
from tests.engines.conftest import ADAPTERS, Models, Reference, Server
from tests.engines.generating import PROMPT, Answer, ask, collect, gather, open_stream
from tests.engines.lora_adapters import ALL_LAYERS, change_config, write_adapter

_numbers = itertools.count(1)


class Lora(NamedTuple):
    path: Path
    reference: Reference


@pytest.fixture(scope="session")
def loras(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Lora]:
    """Adapters of different ranks and layers over model `a`, more than an engine has in memory."""
    shapes = [
        (4, ("q_proj", "v_proj")),
        (8, ALL_LAYERS),
        (1, ("gate_proj", "up_proj", "down_proj")),
    ]
    root = tmp_path_factory.mktemp("loras")
    return [
        Lora(path := root / str(seed), write_adapter(path, models.a, seed=seed, rank=rank, layers=layers))
        for seed, (rank, layers) in enumerate([*shapes, *shapes])
    ]


class Loaded:
    """Adapters loaded under names that no test used before, because SGLang remembers the path of every name."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        self.loras: dict[str, Lora] = {}

    async def load(self, lora: Lora) -> str:
        name = f"run@{next(_numbers)}"
        await self._engine.load_adapter(str(lora.path), name)
        self.loras[name] = lora
        return name

    async def unload_all(self) -> None:
        for name in self.loras:
            await self._engine.unload_adapter(name)


@pytest.fixture
async def loaded(engine: SglangEngine) -> AsyncIterator[Loaded]:
    loaded = Loaded(engine)
    yield loaded
    await loaded.unload_all()


def ask_of(
    adapter: str | None, prompt: tuple[int, ...] = PROMPT, *, count: int = 16, stream: bool = False
) -> GenerateRequest:
    return msgspec.structs.replace(ask(prompt, max_new_tokens=count, stream=stream), adapter=adapter)


def close(server: Server) -> float:
    return 1e-5 if server.kind == "embedded" else 1e-4


def check(answer: Answer, reference: Reference, label: str, server: Server, prompt: tuple[int, ...] = PROMPT) -> None:
    """Assert that every token and log-probability is of the reference, and every label the given one."""
    assert answer.ids == reference.greedy_after(prompt, answer.ids)
    assert answer.logprobs == pytest.approx(reference.of_output(prompt, answer.ids), abs=close(server))
    assert answer.spans == (LabelSpan(label=label, start=0, end=len(answer.ids)),)


async def test_one_batch_of_three_adapters_and_the_base_is_what_peft_computes(
    engine: SglangEngine, server: Server, reference: Reference, loras: list[Lora], loaded: Loaded
) -> None:
    names = [await loaded.load(lora) for lora in loras[:3]]
    assert set((await engine.info()).adapter_names) == set(names)
    info = await engine.info()
    assert info.named_adapters
    assert info.max_running == {"embedded": 128, "sglang": 32}[server.kind]
    # Prompts that begin alike: a prefix cache that mixed adapters would show here, at the latest the second time.
    for _ in range(2):
        requests = [
            (name, PROMPT[: 6 + index], 8 + 5 * index, index % 2 == 0)
            for index, name in enumerate([None, *names, names[0], None, *reversed(names)])
        ]
        answers = await asyncio.gather(
            *(
                collect(engine, ask_of(name, prompt, count=count, stream=stream))
                for name, prompt, count, stream in requests
            )
        )
        for (name, prompt, _, _), answer in zip(requests, answers, strict=True):
            expected = reference if name is None else loaded.loras[name].reference
            check(answer, expected, name or "a", server, prompt)
    references = [reference, *(lora.reference for lora in loaded.loras.values())]
    assert len({each.greedy(PROMPT, 6) for each in references}) == 4


async def test_a_score_is_that_of_the_adapter(
    engine: SglangEngine, server: Server, models: Models, loras: list[Lora], loaded: Loaded
) -> None:
    names = [await loaded.load(lora) for lora in loras[:2]]
    ids = (*PROMPT, 1, 2, 3)
    found = {name: await engine.score(ids, name) for name in (None, *names)}
    for name, lora in loaded.loras.items():
        unbiased = lora.reference.plain(ids)
        assert found[name] == pytest.approx(unbiased, abs=close(server))
    assert found[None] == pytest.approx(Reference(models.a).plain(ids), abs=close(server))


async def test_a_request_finishes_on_the_adapter_that_it_began_with(
    engine: SglangEngine, server: Server, loras: list[Lora], loaded: Loaded
) -> None:
    first = await loaded.load(loras[0])
    stream = open_stream(engine, ask_of(first, count=200, stream=True))
    chunks = [await anext(stream)]
    second = await loaded.load(loras[1])
    check(await collect(engine, ask_of(second)), loras[1].reference, second, server)
    unloading = asyncio.create_task(engine.unload_adapter(first))
    chunks += [chunk async for chunk in stream]
    check(gather(chunks), loras[0].reference, first, server)
    await unloading
    assert (await engine.info()).adapter_names == (second,)
    if server.kind == "embedded":  # SGLang reads the adapter again
        with pytest.raises(AdapterNotLoaded, match=first):
            await collect(engine, ask_of(first))
        with pytest.raises(AdapterNotLoaded, match=first):
            await engine.score((1, 2), first)


async def test_an_adapter_that_made_room_comes_back_when_it_is_asked_for(
    engine: SglangEngine, server: Server, loras: list[Lora], loaded: Loaded
) -> None:
    names = [await loaded.load(lora) for lora in loras]
    held = (await engine.info()).adapter_names
    assert len(held) == ADAPTERS.loaded
    assert names[0] not in held
    answers = await asyncio.gather(*(collect(engine, ask_of(name, stream=True)) for name in names))
    for name, answer in zip(names, answers, strict=True):
        check(answer, loaded.loras[name].reference, name, server)
    assert len((await engine.info()).adapter_names) == ADAPTERS.loaded


async def test_a_pinned_adapter_stays(
    engine: SglangEngine, http: httpx.AsyncClient, loras: list[Lora], loaded: Loaded
) -> None:
    name = f"pinned@{next(_numbers)}"
    body = {"lora_name": name, "lora_path": str(loras[0].path), "pinned": True}
    assert (await http.post("/load_lora_adapter", json=body)).status_code == 200
    for lora in loras:
        await loaded.load(lora)
    assert name in (await engine.info()).adapter_names
    await engine.unload_adapter(name)


async def test_loading_or_unloading_again_changes_nothing(
    engine: SglangEngine, server: Server, loras: list[Lora], loaded: Loaded
) -> None:
    name = await loaded.load(loras[0])
    await engine.load_adapter(str(loras[0].path), name)
    with pytest.raises(EngineFailed, match="already loaded"):
        await engine.load_adapter(str(loras[1].path), name)
    check(await collect(engine, ask_of(name)), loras[0].reference, name, server)
    for _ in range(2):
        await engine.unload_adapter(name)
    await engine.unload_adapter("never")


@pytest.mark.parametrize("fault", ["no directory", "no configuration", "truncated", "rank"])
async def test_an_adapter_that_cannot_be_loaded_is_refused_and_the_others_stay(
    fault: str,
    engine: SglangEngine,
    server: Server,
    models: Models,
    loras: list[Lora],
    loaded: Loaded,
    tmp_path: Path,
) -> None:
    name = await loaded.load(loras[1])
    path = tmp_path / "adapter"
    if fault == "rank":
        write_adapter(path, models.a, seed=1, rank=ADAPTERS.rank + 1)
    elif fault != "no directory":
        shutil.copytree(loras[0].path, path)
    if fault == "no configuration":
        (path / "adapter_config.json").unlink()
    if fault == "truncated":
        file = path / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EngineFailed):
        await engine.load_adapter(str(path), "wrong")
    with pytest.raises(AdapterNotLoaded, match="wrong"):
        await collect(engine, ask_of("wrong"))
    assert (await engine.info()).adapter_names == (name,)
    check(await collect(engine, ask_of(name)), loras[1].reference, name, server)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("shape", "must be floats of the shape"),
        ("layer", "no linear layer"),
        ("half", "lora_B of .* is missing"),
        ("infinite", "not finite"),
        ("other base", "is an adapter of"),
        ("rslora", "use_rslora"),
        ("no base", "names no base model"),
    ],
)
async def test_the_embedded_engine_checks_every_tensor_before_it_takes_an_adapter(
    fault: str, words: str, engine: SglangEngine, server: Server, models: Models, loras: list[Lora], tmp_path: Path
) -> None:
    if server.kind != "embedded":
        pytest.skip("the proxy checks versions before SGLang is given them: a wrong shape ends its process")
    path = tmp_path / "adapter"
    shutil.copytree(loras[0].path, path)
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".lora_B." in name)
    rest = {each: tensor for each, tensor in tensors.items() if each != name}
    changed = {
        "shape": {**rest, name: tensors[name][:-1].contiguous()},
        "layer": {**tensors, name.replace("layers.0", "layers.9"): tensors[name].clone()},
        "half": rest,
        "infinite": {**rest, name: tensors[name] / 0},
    }
    save_file(changed.get(fault, tensors), file)
    options: dict[str, dict[str, Any]] = {
        "other base": {"base_model_name_or_path": str(models.b)},
        "rslora": {"use_rslora": True},
        "no base": {"base_model_name_or_path": None},
    }
    change_config(path, **options.get(fault, {}))
    with pytest.raises(EngineFailed, match=words):
        await engine.load_adapter(str(path), "wrong")


@pytest.mark.parametrize("layers", [("q_proj",), ("k_proj", "o_proj"), ("up_proj", "down_proj")])
async def test_an_adapter_of_half_of_a_joined_layer_does_not_end_the_engine(
    layers: tuple[str, ...],
    engine: SglangEngine,
    server: Server,
    models: Models,
    reference: Reference,
    loaded: Loaded,
    tmp_path: Path,
) -> None:
    half = Lora(tmp_path / "half", write_adapter(tmp_path / "half", models.a, seed=7, layers=layers))
    if server.kind == "sglang":
        with pytest.raises(EngineFailed, match="SGLang cannot serve"):
            await loaded.load(half)
    else:
        name = await loaded.load(half)
        check(await collect(engine, ask_of(name)), half.reference, name, server)
    check(await collect(engine, ask_of(None)), reference, "a", server)


async def test_the_base_of_loaded_adapters_is_not_replaced(
    engine: SglangEngine, server: Server, models: Models, loras: list[Lora]
) -> None:
    if server.kind != "embedded":
        pytest.skip("SGLang replaces it, and its adapters then change other weights than those they were trained on")
    await engine.load_adapter(str(loras[0].path), "one")
    with pytest.raises(EngineFailed, match="unload them"):
        await engine.load_weights(str(models.b), "b")
    await engine.load_weights(str(models.a), "a2")
    check(await collect(engine, ask_of("one")), loras[0].reference, "one", server)
    await engine.unload_adapter("one")
    await engine.load_weights(str(models.b), "b")
    with pytest.raises(EngineFailed, match="is an adapter of"):
        await engine.load_adapter(str(loras[0].path), "one")
    await engine.load_weights(str(loras[0].path), "merged")
    with pytest.raises(EngineFailed, match="load the base model"):
        await engine.load_adapter(str(loras[0].path), "one")
