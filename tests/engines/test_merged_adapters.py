"""LoRA adapters as the trainer publishes them, merged into the base that they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from proxy.engines.embedded.adapters import read_adapted
from proxy.engines.embedded.weights import WeightsRefused
from proxy.engines.protocol import LabelSpan
from proxy.engines.sglang import SglangEngine
from proxy.errors import EngineFailed
from tests.engines.conftest import Models, Reference, Server
from tests.engines.generating import PROMPT, ask, collect
from trainer.config import AdapterSettings, DiskWeights, TrainerSettings
from trainer.loading import load_learnt
from trainer.models.adapters import AdaptedPolicy
from trainer.models.state_dict import gather_weights
from trainer.parallel.mesh import Ranks
from trainer.publish.disk import DiskPublisher


@pytest.fixture(scope="session")
def adapted(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A version's directory over model `a`, and the network that the trainer has of it."""
    settings = TrainerSettings(adapter=AdapterSettings(rank=3, alpha=7))
    policy = load_learnt(models.a, settings, Ranks(0, 1, torch.device("cpu"), None))
    assert isinstance(policy, AdaptedPolicy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in policy.named_weights():
            weight.normal_(0, 0.1, generator=generator)
    head = Head(run_id=RunId("run_a"), run_name="policy", version=0, base_model=str(models.a), weights=None)
    publisher = DiskPublisher(DiskWeights(directory=tmp_path_factory.mktemp("weights")), models.a, policy)
    staged = publisher.stage(head, gather_weights(policy.named_weights(), keep=True), None)
    publisher.settle(staged)
    return Path(staged.weights.uri), policy.adapters.model.inner.eval()


async def test_an_adapter_is_served_as_the_trainer_computes_it(
    engine: SglangEngine, server: Server, models: Models, adapted: tuple[Path, Any]
) -> None:
    if server.kind == "sglang":
        assert not (await engine.info()).adapters, "it is never given one"
        return
    directory, network = adapted
    reference = Reference(models.a)
    reference.network = network
    before = await collect(engine, ask())
    assert (await engine.info()).adapters
    for first in (models.a, models.b):  # what is served does not hang on what was served before
        await engine.load_weights(str(first), "first")
        await engine.load_weights(str(directory), "v1")
        answer = await collect(engine, ask())
        assert answer.ids == reference.greedy(PROMPT, 16) != before.ids
        assert answer.logprobs == pytest.approx(reference.of_output(PROMPT, answer.ids), abs=server.exactness)
        assert answer.spans == (LabelSpan(label="v1", start=0, end=16),)
    await engine.load_weights(str(models.a), "a")
    after = await collect(engine, ask())
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)


async def test_an_adapter_that_cannot_be_applied_changes_nothing(
    engine: SglangEngine, server: Server, adapted: tuple[Path, Any], tmp_path: Path
) -> None:
    if server.kind == "sglang":
        pytest.skip("it is never given an adapter")
    before = await collect(engine, ask())
    broken = tmp_path / "broken"
    shutil.copytree(adapted[0], broken)
    change(broken, base_model_name_or_path=str(tmp_path / "nothing"))
    with pytest.raises(EngineFailed, match="nothing"):
        await engine.load_weights(str(broken), "v2")
    after = await collect(engine, ask())
    assert (after.logprobs, after.spans) == (before.logprobs, before.spans)


def change(directory: Path, **values: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_rslora": True}, "use_rslora = True"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "must be positive"),
        ({"base_model_name_or_path": None}, "names no base model"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    adapted: tuple[Path, Any], tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    directory = tmp_path / "other"
    shutil.copytree(adapted[0], directory)
    change(directory, **changed)
    with pytest.raises(WeightsRefused, match=said):
        read_adapted(str(directory))


def test_tensors_that_do_not_fit_the_base_are_refused(adapted: tuple[Path, Any], tmp_path: Path) -> None:
    directory = tmp_path / "other"
    shutil.copytree(adapted[0], directory)
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".lora_A." in name)
    rest = {each: tensor for each, tensor in tensors.items() if each != name}
    for changed in (
        rest,
        {**rest, name: tensors[name][:, :5].contiguous()},
        {**rest, name.replace("layers.0", "layers.7"): tensors[name]},
        {**rest, "base_model.model.model.embed_tokens.lora_embedding_A": tensors[name]},
    ):
        save_file(changed, file)
        with pytest.raises(WeightsRefused):
            read_adapted(str(directory))
