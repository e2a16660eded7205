"""Compare with transformers: the same numbers from the same files, and the same files from the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.models.archon.shapes import MODELS, VOCABULARY, save_random
from trainer.algorithm.logprobs import token_logprobs
from trainer.config import Precision
from trainer.errors import UnsupportedModel
from trainer.models.archon.attention import positions_of
from trainer.models.archon.model import ArchonModel
from trainer.models.archon.weights import load_archon
from trainer.models.huggingface import load_policy
from trainer.models.state_dict import gather_weights, read_weights, save_weights

LENGTHS = (7, 12, 3, 1)


def load(directory: Path, precision: Precision = Precision.FLOAT32, *, checkpointed: bool = False) -> ArchonModel:
    return load_archon(directory, precision, token_logprobs, activation_checkpointing=checkpointed)


def packed() -> tuple[Tensor, Tensor]:
    """Return four sequences in each of two rows: token ids and positions."""
    generator = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(0, VOCABULARY, (2, sum(LENGTHS)), generator=generator)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    return ids_BT, positions_T.expand(2, -1)


def single_logits(model: Any, ids_BT: Tensor) -> Tensor:
    """Return transformers' logits for each sequence by itself."""
    parts = [
        model(input_ids=part_BT, use_cache=False).logits for part_BT in torch.split(ids_BT, list(LENGTHS), dim=1)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_packed_rows_equal_transformers_for_single_sequences(
    tmp_path: Path, name: str
) -> None:
    theirs, ours = save_random(tmp_path, name), load(tmp_path)
    ids_BT, positions_BT = packed()
    wanted_BTV = single_logits(theirs, ids_BT)
    found_BTV = ours.causal.lm_head(ours.causal.model(ids_BT, positions_of(positions_BT, ours.config)))
    assert wanted_BTV.std() > 0.3, "the model is not one of flat distributions"
    assert (found_BTV - wanted_BTV).abs().max() < 1e-5
    weights_BTV = torch.randn(found_BTV.shape, generator=torch.Generator().manual_seed(4)) / found_BTV.numel()
    torch.autograd.backward((wanted_BTV * weights_BTV).sum())
    torch.autograd.backward((found_BTV * weights_BTV).sum())
    wanted = gradients_of(theirs)
    for on_disk, gradient in gradients_by_name(ours).items():
        assert gradient.abs().max() > 1e-6, f"{on_disk} takes part"
        assert (gradient - wanted[on_disk]).abs().max() < 1e-5 * max(1.0, float(wanted[on_disk].abs().max())), on_disk


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Return gradients by the names on disk: transformers' own experts are stacked, gate above up."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        before, _, after = name.partition(".experts.")
        for number, part in enumerate(parameter.grad if after else ()):
            stem = f"{before}.experts.{number}"
            if after == "gate_up_proj":
                found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = part.chunk(2)
            else:
                found[f"{stem}.{after}.weight"] = part
        if not after:
            found[name] = parameter.grad
    return found


def gradients_by_name(model: ArchonModel) -> dict[str, Tensor]:
    found = []
    for name, parameter in model.named_weights():
        assert parameter.grad is not None, name
        found.append((name, torch.nn.Parameter(parameter.grad)))
    return gather_weights(found, keep=True)


@pytest.mark.parametrize("name", MODELS)
def test_written_files_equal_the_original_ones(tmp_path: Path, name: str) -> None:
    """The files are equal bit for bit under the same names, and transformers reads them."""
    theirs = save_random(tmp_path, name)
    gathered = gather_weights(load(tmp_path).named_weights(), keep=True)
    stored = read_weights(tmp_path)
    assert gathered.keys() == stored.keys()
    assert all(torch.equal(gathered[each], stored[each]) for each in stored)
    again = tmp_path / "again"
    again.mkdir()
    save_weights(gathered, again)
    (again / "config.json").write_text((tmp_path / "config.json").read_text())
    read = type(theirs).from_pretrained(again)
    for each, weight in theirs.state_dict().items():
        assert torch.equal(read.state_dict()[each], weight)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_bfloat16_files_are_read_as_the_fsdp_backend_reads_them(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name).to(torch.bfloat16).save_pretrained(tmp_path)
    other = load_policy(tmp_path, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    wanted = dict(other.named_weights())
    for each, weight in load(tmp_path).named_weights():
        assert torch.equal(weight, wanted[each])


@pytest.mark.parametrize("precision", list(Precision))
def test_scores_equal_those_of_the_fsdp_backend(tmp_path: Path, precision: Precision) -> None:
    save_random(tmp_path, "qwen3")
    ids_BT, positions_BT = packed()
    predictor_N = torch.tensor([0, 4, 8, 20, 30, 44])
    targets_N, temperature_N = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.3])
    ours = load(tmp_path, precision)
    theirs = load_policy(tmp_path, precision, token_logprobs, activation_checkpointing=False)
    found = ours(ids_BT, positions_BT, predictor_N, targets_N, temperature_N)
    wanted = theirs(ids_BT, positions_BT, predictor_N, targets_N, temperature_N)
    tolerance = 1e-5 if precision is Precision.FLOAT32 else 0.05
    assert all((one - other).abs().max() < tolerance for one, other in zip(found, wanted, strict=True))
    assert ours.vocabulary == theirs.vocabulary
    assert len(ours.layers) == len(theirs.layers)
    exact = load(tmp_path)(ids_BT, positions_BT, predictor_N, targets_N, temperature_N)
    assert torch.equal(found[0], exact[0]) is (precision is Precision.FLOAT32)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_no_gradient(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name)
    ids_BT, positions_BT = packed()
    gradients = []
    for checkpointed in (False, True):
        model = load(tmp_path, checkpointed=checkpointed)
        computed: list[int] = []
        model.layers[0].get_submodule("input_layernorm").register_forward_pre_hook(
            lambda *_, computed=computed: computed.append(1)
        )
        some_N = torch.arange(5)
        logprobs_N, _ = model(ids_BT, positions_BT, some_N, some_N, torch.ones(5))
        torch.autograd.backward(logprobs_N.sum())
        assert len(computed) == (2 if checkpointed else 1)
        gradients.append(gradients_by_name(model))
    assert all(torch.equal(gradients[0][each], gradients[1][each]) for each in gradients[0])


def test_a_mixture_of_experts_is_refused_by_the_other_backend(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3_moe")
    with pytest.raises(UnsupportedModel, match="other names in memory"):
        load_policy(tmp_path, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)


def test_an_unknown_architecture_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Qwen2, Qwen3, Qwen3-MoE, but not llama.*\"fsdp\""):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope type linear"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    save_random(tmp_path, "qwen3", **change)
    with pytest.raises(UnsupportedModel, match=said):
        load(tmp_path)


def test_files_that_do_not_fit_the_definition_are_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3", tie_word_embeddings=False)
    (tmp_path / "model.safetensors").rename(tmp_path / "whole")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "whole")
    strange = {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(strange, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias is in the files"):
        load(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight is missing"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "hidden_size": 64}))
    with pytest.raises(UnsupportedModel, match="should have shape"):
        load(tmp_path)
