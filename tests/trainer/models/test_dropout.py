from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.identifiers import RunId
from proxy.contract.policy import Head
from tests.small_models import SMALL
from trainer.algorithm.logprobs import token_logprobs
from trainer.config import Precision
from trainer.fit.reward_model import load_reward_model
from trainer.models.archon.weights import load_archon
from trainer.models.huggingface import PolicyModel, load_policy
from trainer.models.value import load_value

HALF = 0.5
OTHER_WORDS = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
IDS = torch.arange(1, 13)[None]
PLACES = torch.arange(11)


def save_with_dropout(directory: Path, kind: str) -> Path:
    """Save a small model of a kind; every dropout in its configuration is one half."""
    import transformers

    shape = {**SMALL, "max_position_embeddings": 64}
    changes: dict[str, dict[str, Any]] = {
        "GPT2": {**OTHER_WORDS, "resid_pdrop": HALF, "embd_pdrop": HALF, "attn_pdrop": HALF},
        "OPT": {**shape, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": HALF, "layerdrop": HALF},
        "Phi": {**shape, "resid_pdrop": HALF, "embd_pdrop": HALF, "attention_dropout": HALF},
        "Qwen2": {**shape, "attention_dropout": HALF},
        "Falcon": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_dropout": HALF,
        },
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**changes[kind], "attention_dropout": HALF})
    causal: Any = transformers.AutoModelForCausalLM
    model: Any = causal.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # with the small default initialisation dropout has almost no effect
    model.save_pretrained(directory)
    return directory


def learnt(model: PolicyModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return log-probabilities of a training pass, and its gradient."""
    model.zero_grad(set_to_none=True)
    logprobs_N, _ = model(IDS, torch.arange(12)[None], PLACES, IDS[0, 1:], torch.ones(11))
    torch.autograd.backward(logprobs_N.sum())
    return logprobs_N.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["GPT2", "OPT", "Phi", "Qwen2", "Falcon"])
def test_equal_calls_of_a_policy_give_equal_log_probabilities_and_gradients(
    tmp_path: Path, kind: str, checkpointing: bool
) -> None:
    directory = save_with_dropout(tmp_path, kind)
    model = load_policy(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=checkpointing)
    passes: list[int] = []
    model.layers[0].get_submodule(next(name for name, _ in model.layers[0].named_children())).register_forward_hook(
        lambda *_: passes.append(1)
    )
    (first_N, gradient), (second_N, again) = learnt(model), learnt(model)
    assert len(passes) == (4 if checkpointing else 2)
    assert torch.equal(first_N, second_N)
    assert all(torch.equal(one, other) for one, other in zip(gradient, again, strict=True))
    with torch.no_grad():
        scored_N, _ = model.eval()(IDS, torch.arange(12)[None], PLACES, IDS[0, 1:], torch.ones(11))
    assert torch.equal(first_N, scored_N)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_equal_calls_of_a_critic_give_equal_values(tmp_path: Path, checkpointing: bool) -> None:
    model = load_value(save_with_dropout(tmp_path, "OPT"), Precision.FLOAT32, activation_checkpointing=checkpointing)
    torch.nn.init.ones_(model.value_head.weight)
    first, second = (model(IDS, torch.arange(12)[None], PLACES) for _ in range(2))
    assert first.std() > 0
    assert torch.equal(first, second)


def test_equal_calls_of_a_reward_model_give_equal_scores(tmp_path: Path) -> None:
    directory = save_with_dropout(tmp_path, "GPT2")
    head = Head(run_id=RunId("run_1"), run_name="run", version=0, base_model=str(directory), weights=None)
    model = load_reward_model(head, directory, Precision.FLOAT32, seed=0)
    first, second = (model(IDS, torch.arange(12)[None], torch.tensor([3, 11])) for _ in range(2))
    assert torch.equal(first, second)


def test_archon_trains_a_model_whose_configuration_has_dropout_without_it(tmp_path: Path) -> None:
    directory = save_with_dropout(tmp_path, "Qwen2")
    archon = load_archon(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    other = load_policy(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    torch.testing.assert_close(learnt(archon)[0], learnt(other)[0], atol=1e-5, rtol=1e-5)
