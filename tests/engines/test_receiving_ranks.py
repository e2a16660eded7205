"""Weights that a trainer sends to a SGLang that divides its model among two processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from proxy.engines.protocol import LabelSpan, PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.settings import EngineSettings
from tests.engines.conftest import SGLANG_TIMEOUT, Models, Reference, plan_of, started
from tests.engines.generating import PROMPT, ask, collect
from tests.engines.weight_sender import WeightSender, offer_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(SGLANG_TIMEOUT)]


@pytest.fixture
def url(models: Models, tmp_path: Path) -> Iterator[str]:
    """The address of an engine of two processes, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("SGLang divides a model on CPUs among cores, and this machine has one")
    plan = plan_of("sglang", models.a, "--tp-size=2")
    divided = {**plan.env, "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    with started(msgspec.structs.replace(plan, env=divided), tmp_path / "sglang.log"):
        yield plan.url


async def test_every_process_receives_its_part(
    url: str, models: Models, reference: Reference, reference_b: Reference
) -> None:
    engine = SglangEngine(url, EngineSettings(url=url))
    ranks = (await engine.info()).ranks
    assert ranks == 2
    assert (await collect(engine, ask())).ids == reference.greedy(PROMPT, 16)
    tensors = load_file(models.b / "model.safetensors")
    await engine.pause(PauseMode.IN_PLACE)
    async with WeightSender(ranks=ranks).sending(tensors) as place:
        await engine.receive_weights(place, offer_of(tensors, per_bucket=3), "sent")
    await engine.resume()
    answer = await collect(engine, ask())
    assert answer.ids == reference_b.greedy(PROMPT, 16)
    assert answer.spans == (LabelSpan(label="sent", start=0, end=16),)
    await engine.aclose()
