"""A skeleton with its weights read is the model that transformers loads, and a stand-in shows what the model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small_models import SMALL
from trainer.algorithm.logprobs import token_logprobs
from trainer.config import Precision
from trainer.errors import UnsupportedModel
from trainer.models.huggingface import load_policy, policy_skeleton, policy_stand_in
from trainer.models.skeleton import furnish, has_skeleton, is_skeleton


def _made(kind: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128))


_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": _made("Qwen2", num_attention_heads=2, tie_word_embeddings=True),
    "qwen3": _made("Qwen3", tie_word_embeddings=False, pad_token_id=63),
    "llama": _made("Llama", rope_parameters=_LLAMA_ROPE),
    "mistral": _made("Mistral", sliding_window=None),
    "windows": _made("Mistral", sliding_window=128),
    "kinds": _made("Qwen3", use_sliding_window=True, sliding_window=128, max_window_layers=1),
    "gemma": _made("Gemma", tie_word_embeddings=True),
    "scaled": _made("Granite", logits_scaling=8.0, tie_word_embeddings=False),
    "gpt2": _gpt2,
}


@pytest.fixture(params=_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = _MODELS[request.param]()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_stand_in_shows_the_layouts_that_the_model_computes_correctly(directory: Path) -> None:
    """Or that it computes none of them: its logits are not those of its head."""
    try:
        loaded = load_policy(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    except UnsupportedModel:
        with pytest.raises(UnsupportedModel, match="log-probabilities of padded sequences differ"):
            policy_stand_in(directory, Precision.FLOAT32, token_logprobs, torch.device("cpu"))
    else:
        policy = policy_stand_in(directory, Precision.FLOAT32, token_logprobs, torch.device("cpu"))
        assert policy.packings == loaded.packings


def test_a_skeleton_with_its_weights_is_the_model(directory: Path) -> None:
    assert has_skeleton(directory)
    skeleton = policy_skeleton(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    assert is_skeleton(skeleton)
    furnish(skeleton, torch.device("cpu"))
    skeleton.load_base(directory)
    from transformers import AutoModelForCausalLM

    inner: Any = skeleton.inner
    whole: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids_BT = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, wanted = (each.eval()(input_ids=ids_BT).logits for each in (inner, whole))
    assert torch.equal(found, wanted)
    tied = [
        len({id(each) for each in (model.get_output_embeddings().weight, model.get_input_embeddings().weight)})
        for model in (inner, whole)
    ]
    assert tied[0] == tied[1]


def test_quantised_weights_have_no_skeleton(tmp_path: Path) -> None:
    _MODELS["qwen3"]().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    assert not has_skeleton(tmp_path)
