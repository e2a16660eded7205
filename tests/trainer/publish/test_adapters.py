"""Versions of an adapter: peft reads them, a trainer resumes from them, and they are small."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head, WeightsFormat
from tests.trainer.models.test_adapters import copies, logprobs_of, randomise
from tests.trainer.tiny import ALONE, load_tiny
from trainer.config import AdapterPublish, AdapterSettings, DiskWeights, TrainerSettings
from trainer.errors import WeightsUnusable
from trainer.loading import load_learnt
from trainer.models.adapters import AdaptedPolicy
from trainer.models.state_dict import gather_weights
from trainer.publish.disk import DiskPublisher
from trainer.publish.publisher import TrainerState


class World:
    def __init__(self, directory: Path, base: Path, **shape: Any) -> None:
        self.directory, self.base = directory, base
        self.head = Head(run_id=RunId("run_a"), run_name="policy", version=0, base_model=str(base), weights=None)
        self.policy = self.load(**shape)

    def load(self, **shape: Any) -> AdaptedPolicy:
        settings = TrainerSettings(adapter=AdapterSettings.model_validate({"rank": 2, **shape}))
        policy = load_learnt(self.base, settings, ALONE)
        assert isinstance(policy, AdaptedPolicy)
        return policy

    def publish(self, state: TrainerState | None = None) -> Path:
        publisher = DiskPublisher(DiskWeights(directory=self.directory), self.base, self.policy)
        staged = publisher.stage(self.head, gather_weights(self.policy.named_weights(), keep=True), state)
        publisher.settle(staged)
        self.head = msgspec.structs.replace(self.head, version=self.head.version + 1, weights=staged.weights)
        return Path(staged.weights.uri)

    def restore(self, policy: Any) -> TrainerState | None:
        return DiskPublisher(DiskWeights(directory=self.directory), self.base, policy).restore(self.head, policy)


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def by_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
        return PeftModel.from_pretrained(network, str(adapter)).eval()


def peft_logprobs(network: Any) -> torch.Tensor:
    ids = torch.tensor([[3, 9, 27, 17, 51, 5, 60, 2]])
    with torch.no_grad():
        logprobs: torch.Tensor = network(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def test_peft_reads_a_version_of_an_adapter(tiny_model: Path, tmp_path: Path) -> None:
    world = World(tmp_path, tiny_model, alpha=5, targets=["q_proj", "down_proj"])
    randomise(world.policy)
    directory = world.publish({"steps": 1})
    assert world.head.weights is not None
    assert world.head.weights.format is WeightsFormat.ADAPTER
    assert world.head.weights.bytes == (directory / "adapter_model.safetensors").stat().st_size
    beside = [name for name in files(directory) if not name.startswith("trainer_state/")]
    assert beside == ["adapter_config.json", "adapter_model.safetensors"]
    assert "trainer_state/state.json" in files(directory)
    with torch.no_grad():
        wanted = logprobs_of(world.policy)
    torch.testing.assert_close(peft_logprobs(by_peft(tiny_model, directory)), wanted, atol=1e-5, rtol=1e-5)


def test_transformers_reads_a_merged_version(tiny_model: Path, tmp_path: Path) -> None:
    """The weights are those that peft merges, up to the last bits of a sum; the adapter is beside them."""
    from transformers import AutoModelForCausalLM

    world = World(tmp_path, tiny_model, publish=AdapterPublish.MERGED)
    randomise(world.policy)
    directory = world.publish()
    assert world.head.weights is not None
    assert world.head.weights.format is WeightsFormat.HUGGINGFACE
    network: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert network.dtype == torch.float32
    with torch.no_grad():
        wanted = logprobs_of(world.policy)
    torch.testing.assert_close(peft_logprobs(network), wanted, atol=1e-5, rtol=1e-5)
    theirs = by_peft(tiny_model, directory / "adapter").merge_and_unload()
    for (name, weight), (_, other) in zip(network.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("publish", list(AdapterPublish))
def test_a_version_is_restored(tiny_model: Path, tmp_path: Path, publish: AdapterPublish) -> None:
    world = World(tmp_path, tiny_model, publish=publish)
    randomise(world.policy)
    world.publish({"steps": 3})
    other = world.load()
    assert world.restore(other) == {"steps": 3}
    assert all(torch.equal(weight, copies(world.policy)[name]) for name, weight in other.named_weights())
    world.head = msgspec.structs.replace(world.head, weights=None)
    assert world.restore(other) is None
    fresh = copies(world.load())
    assert all(torch.equal(weight, fresh[name]) for name, weight in other.named_weights())


def test_an_adapter_is_small_beside_its_base(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(
        vocab_size=512, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **shape
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    world = World(tmp_path / "weights", tmp_path / "base", rank=4)
    moments = {
        name: {"exp_avg": weight.detach(), "exp_avg_sq": weight.detach()}
        for name, weight in world.policy.named_weights()
    }
    directory = world.publish({"optimizer": moments})
    base = sum(path.stat().st_size for path in (tmp_path / "base").iterdir())
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    weights = sum(weight.numel() for _, weight in world.policy.named_weights())
    assert size < 4 * 3 * weights + 150_000, "its weights, two moments of each, and what is told of each tensor"
    assert size < base / 10


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 3}, "r 2, and .* asks for r 3"),
        ({"alpha": 1}, "lora_alpha 32.0"),
        ({"targets": ["q_proj"]}, "target_mod"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    tiny_model: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    world = World(tmp_path, tiny_model)
    world.publish()
    with pytest.raises(WeightsUnusable, match=said):
        world.restore(world.load(**changed))


def test_whole_weights_and_adapters_are_distinguished(tiny_model: Path, tmp_path: Path) -> None:
    world = World(tmp_path, tiny_model)
    world.publish()
    whole = load_tiny(tiny_model)
    with pytest.raises(WeightsUnusable, match="an adapter of rank 2"):
        world.restore(whole)
    publisher = DiskPublisher(DiskWeights(directory=tmp_path), tiny_model, whole)
    staged = publisher.stage(world.head, gather_weights(whole.named_weights(), keep=True), None)
    publisher.settle(staged)
    world.head = msgspec.structs.replace(world.head, version=2, weights=staged.weights)
    with pytest.raises(WeightsUnusable, match="has whole weights"):
        world.restore(world.policy)


def test_a_merged_version_continues_as_a_whole_model_with_a_new_optimiser(tiny_model: Path, tmp_path: Path) -> None:
    world = World(tmp_path, tiny_model, publish=AdapterPublish.MERGED)
    randomise(world.policy)
    name = next(name for name, _ in world.policy.named_weights())
    world.publish({"optimizer": {name: {"step": torch.zeros(())}}})
    whole = load_tiny(tiny_model)
    assert world.restore(whole) is None
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(whole), logprobs_of(world.policy), atol=1e-5, rtol=1e-5)


def test_a_damaged_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    world = World(tmp_path, tiny_model)
    directory = world.publish()
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsUnusable, match=r"adapter_config\.json"):
        world.restore(world.policy)
    (directory / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(WeightsUnusable, match="SHA-256 differs"):
        world.restore(world.policy)
