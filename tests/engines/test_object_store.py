"""Engines on a site that shares only an object store with the trainer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from proxy.contract.delta import is_delta
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from proxy.engines.protocol import LabelSpan, PauseMode
from proxy.engines.sglang import SglangEngine
from proxy.versions.inspector import WeightsInspector
from tests.engines.conftest import Models, Reference, Server
from tests.engines.generating import PROMPT, ask, collect
from tests.object_store import URL, object_server
from trainer.config import DeltaWeights
from trainer.publish.transports import publisher_of


async def test_versions_and_differences_of_another_site_are_served(
    engine: SglangEngine, models: Models, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, engines = tmp_path / "trainers", tmp_path / "engines"
    settings = DeltaWeights.model_validate({"directory": trainers, "dtype": "bfloat16", "url": URL})
    head = Head(run_id=RunId("run_x"), run_name="x", version=0, base_model=str(models.b), weights=None)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(models.b / "model.safetensors").items()}
    with object_server(monkeypatch):
        publisher = publisher_of(settings, models.b)
        inspector = WeightsInspector(engines / "weights", engines / "cache", 10**9, url=URL)
        for version in (1, 2):
            tensors = {name: tensor * (1 + version / 64) for name, tensor in tensors.items()}
            staged = publisher.stage(head, tensors, None)
            publisher.settle(staged)
            head = msgspec.structs.replace(head, version=version, weights=staged.weights)
            assert is_delta(staged.weights) is (version == 2)
            await inspector.check(staged.weights, str(models.b))
            path = Path(inspector.path_of(staged.weights))
            assert path.is_relative_to(engines)
            await engine.pause(PauseMode.IN_PLACE)
            await engine.load_weights(str(path), f"version {version}")
            await engine.resume()
            answer = await collect(engine, ask())
            assert answer.spans == (LabelSpan(label=f"version {version}", start=0, end=16),)
            expected = Reference(path).of_output(PROMPT, answer.ids)
            assert answer.logprobs == pytest.approx(expected, abs=server.exactness)
        publisher.close()
        await inspector.aclose()
