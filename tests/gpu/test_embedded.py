"""The embedded engine on the device: greedy and sampled answers, adapters and swaps, compared with whole passes of
transformers on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from proxy.engines.embedded.adapters import read_adapter
from proxy.engines.embedded.generation import Generation
from proxy.engines.embedded.lora import Adapter
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.scheduler import Scheduler
from proxy.engines.embedded.weights import checksums, read_directory
from proxy.engines.embedded.wire import SamplingRules
from tests.engines.embedded.test_sampling import rules
from tests.trainer.models.archon.shapes import save_random

pytestmark = pytest.mark.gpu

PROMPTS = [[(11 * index + 3 * step) % 60 + 1 for step in range(3 + 4 * index)] for index in range(12)]
GREEDY = rules(greedy=True, max_new_tokens=24, ignore_eos=True)
SAMPLED = msgspec.structs.replace(GREEDY, greedy=False, temperature=0.7)
EXACTNESS = 2e-4
"""Largest difference of log-probabilities in float32 between the two devices."""


def served(path: Path, device: torch.device, dtype: str = "float32") -> ServedModel:
    return ServedModel(str(path), device=str(device), dtype=dtype, seed=0, max_total_tokens=8192)


@asynccontextmanager
async def running(model: ServedModel) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(
        model, weight_label="first", max_running=8, max_total_tokens=8192, loop=asyncio.get_running_loop()
    )
    scheduler.start()
    try:
        yield scheduler
    finally:
        await asyncio.to_thread(scheduler.close)


async def answered(
    scheduler: Scheduler, rules: SamplingRules, adapters: Sequence[Adapter | None] = (None,) * len(PROMPTS)
) -> list[Generation]:
    """Return the answers to all prompts, asked at once: they wait for places in the batch and join it one by one."""

    async def ask(prompt: list[int], adapter: Adapter | None) -> Generation:
        done = asyncio.Event()
        generation = Generation(
            rid="",
            prompt=prompt,
            rules=rules,
            stop_ids=frozenset(),
            stop_strings=None,
            grammar=None,
            stream=False,
            notify=done.set,
            adapter=adapter,
        )
        scheduler.add(generation)
        await done.wait()
        assert generation.failure is None
        return generation

    return await asyncio.gather(*(ask(*each) for each in zip(PROMPTS, adapters, strict=True)))


def check(model: Any, generation: Generation, rules: SamplingRules) -> None:
    """Check the recorded log-probabilities, and greedy tokens, against one pass of the model over the whole text."""
    ids = [*generation.prompt, *generation.output]
    with torch.no_grad():
        logits_tv = model(input_ids=torch.tensor([ids])).logits[0].float()
    logprobs_tv = torch.log_softmax(logits_tv / rules.temperature, dim=-1)[len(generation.prompt) - 1 : -1]
    of_output = logprobs_tv.gather(1, torch.tensor(generation.output)[:, None])[:, 0]
    assert len(generation.output) == rules.max_new_tokens
    assert generation.logprobs == pytest.approx(of_output.tolist(), abs=EXACTNESS)
    if rules.greedy:
        assert of_output.tolist() == pytest.approx(logprobs_tv.max(dim=-1).values.tolist(), abs=EXACTNESS)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen3_moe"])
async def test_answers_have_the_log_probabilities_that_a_cpu_computes(
    device: torch.device, name: str, tmp_path: Path
) -> None:
    reference = save_random(tmp_path, name)
    async with running(served(tmp_path, device)) as scheduler:
        for rules in (GREEDY, SAMPLED):
            for generation in await answered(scheduler, rules):
                check(reference, generation, rules)


async def test_a_bfloat16_engine_stays_near_the_float32_model(device: torch.device, tmp_path: Path) -> None:
    reference = save_random(tmp_path, "qwen3")
    async with running(served(tmp_path, device, "bfloat16")) as scheduler:
        answers = await answered(scheduler, SAMPLED)
    gaps = []
    for generation in answers:
        ids = [*generation.prompt, *generation.output]
        with torch.no_grad():
            logits_tv = reference(input_ids=torch.tensor([ids])).logits[0].float() / SAMPLED.temperature
        rows_tv = torch.log_softmax(logits_tv, dim=-1)[len(generation.prompt) - 1 : -1]
        wanted = rows_tv.gather(1, torch.tensor(generation.output)[:, None])[:, 0]
        gaps.append((torch.tensor(generation.logprobs) - wanted).abs())
    assert 0 < float(torch.cat(gaps).mean()) < 0.1


async def test_weights_are_replaced_between_two_steps_and_every_token_names_its_own(
    device: torch.device, tmp_path: Path
) -> None:
    """Weights are prepared while the model computes; the answers after the swap are those of the new weights."""
    save_random(tmp_path / "first", "qwen3")
    second = save_random(tmp_path / "second", "qwen3")
    with torch.no_grad():
        for each in second.parameters():
            each.mul_(1.1)
    second.save_pretrained(tmp_path / "second")
    model = served(tmp_path / "first", device)
    async with running(model) as scheduler:
        during = asyncio.create_task(answered(scheduler, SAMPLED))
        weights = await asyncio.to_thread(model.prepare, read_directory(str(tmp_path / "second")), complete=True)
        await asyncio.wrap_future(scheduler.submit(lambda: scheduler.load(weights, label="second")))
        await during
        after = await answered(scheduler, GREEDY)
    for generation in after:
        check(second, generation, GREEDY)
        assert generation.final_label == "second"
    assert checksums(model.network) == checksums(second)


async def test_rows_of_one_batch_have_adapters_of_their_own(device: torch.device, tmp_path: Path) -> None:
    base = save_random(tmp_path / "base", "qwen3")
    merged = save_random(tmp_path / "merged", "qwen3")
    layer = "model.layers.0.self_attn.q_proj"
    weight = base.state_dict()[f"{layer}.weight"]
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(4, weight.shape[1], generator=generator), torch.randn(weight.shape[0], 4, generator=generator)
    directory = tmp_path / "adapter"
    directory.mkdir()
    names = [f"base_model.model.{layer}.lora_{part}.weight" for part in "AB"]
    save_file(dict(zip(names, pair, strict=True)), directory / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 2, "base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        merged.get_submodule(layer).weight.add_(pair[1] @ pair[0], alpha=0.5)

    model = served(tmp_path / "base", device)
    adapter = read_adapter(
        "a", str(directory), base=model.path, shapes=model.layers.shapes, max_rank=8, device=model.device
    )
    model.layers.attach(list(adapter.pairs))
    of_rows = [adapter if index % 2 else None for index in range(len(PROMPTS))]
    async with running(model) as scheduler:
        answers = await answered(scheduler, SAMPLED, of_rows)
    for generation in answers:
        check(merged if generation.adapter else base, generation, SAMPLED)
