from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.small_models import SMALL
from tests.trainer.tiny import load_tiny
from trainer.config import LearningRate, OptimizerSettings
from trainer.errors import ConfigurationError
from trainer.models.value import load_value
from trainer.optimizer import adamw, learning_rate_at, step_at
from trainer.parallel.checkpoint import capture_optimizer, restore_optimizer


def settings_of(**values: Any) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"learning_rate": 2.0, **values})


def test_schedules_decay_from_the_whole_rate_to_the_minimum() -> None:
    linear = settings_of(schedule="linear", total_steps=5, minimum_share=0.0)
    assert [learning_rate_at(step, linear) for step in range(7)] == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4, 0.0, 0.0])
    cosine = settings_of(schedule="cosine", total_steps=6, warmup_steps=3, minimum_share=0.5)
    behind = [0.5 + 0.25 * (1 + math.cos(math.pi * gone / 4)) for gone in range(5)]
    wanted = [2 / 3, 4 / 3, *(2 * share for share in behind), 1.0]
    assert [learning_rate_at(step, cosine) for step in range(8)] == pytest.approx(wanted, abs=1e-12)


@given(
    schedule=st.sampled_from(LearningRate),
    total=st.integers(2, 200),
    warmup=st.integers(0, 100),
    minimum=st.floats(0, 0.99),
)
def test_a_schedule_reaches_the_whole_rate_and_never_falls_below_its_minimum(
    schedule: LearningRate, total: int, warmup: int, minimum: float
) -> None:
    warmup = min(warmup, total - 1)
    decay: dict[str, Any] = (
        {} if schedule is LearningRate.CONSTANT else {"total_steps": total, "minimum_share": minimum}
    )
    settings = settings_of(schedule=schedule, warmup_steps=warmup, **decay)
    rates = [learning_rate_at(step, settings) for step in range(total + 3)]
    top = max(0, warmup - 1)
    assert rates[top] == 2.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    end = 2.0 if schedule is LearningRate.CONSTANT else 2.0 * minimum
    assert rates[total:] == pytest.approx([end] * 3, abs=1e-12)
    assert rates[total - 1] >= end


def test_contradictions_of_a_schedule_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"total_steps": 5}, "total_steps says how the learning rate goes down"),
        ({"minimum_share": 0.5}, "minimum_share says how"),
        (
            {"schedule": "linear", "total_steps": 5, "warmup_steps": 5},
            r"warmup_steps \(5\) must be below total_steps",
        ),
    ]
    for values, said in refused:
        with pytest.raises(ValueError, match=said):
            settings_of(**values)
    with pytest.raises(ConfigurationError, match=r"total_steps: schedule = cosine needs it"):
        settings_of(schedule="cosine").check_end()
    settings_of(schedule="cosine", total_steps=3).check_end()
    settings_of().check_end()


def spared_names(model: Any, weight_decay: float = 0.1) -> set[str]:
    """Return the parameters that a step with a gradient of zero does not change: only weight decay moves the
    others."""
    before = {name: weight.detach().clone() for name, weight in model.named_weights()}
    optimizer = adamw(model, settings_of(weight_decay=weight_decay))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    step_at(optimizer, 1.0)
    return {name for name, weight in model.named_weights() if torch.equal(weight.detach(), before[name])}


def test_weight_decay_spares_norms_biases_and_embeddings(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    untied: Any = Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "tie_word_embeddings": False}))
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    untied.save_pretrained(tmp_path)
    spared = spared_names(load_tiny(tmp_path))
    assert {name for name in spared if name.endswith("bias")}
    assert all("norm" in name or name.endswith(("bias", "embed_tokens.weight")) for name in spared)
    every = {name for name, _ in load_tiny(tmp_path).named_weights()}
    assert all(name.endswith("weight") and "norm" not in name for name in every - spared)
    assert "lm_head.weight" in every - spared


def test_a_tied_head_is_an_embedding_and_a_critics_head_a_matrix(tiny_model: Path) -> None:
    assert "model.embed_tokens.weight" in spared_names(load_tiny(tiny_model))
    critic = load_value(tiny_model, load_tiny(tiny_model).precision, activation_checkpointing=False)
    nn.init.ones_(critic.value_head.weight)
    nn.init.ones_(critic.value_head.bias)
    spared = spared_names(critic)
    assert "value_head.bias" in spared
    assert "value_head.weight" not in spared


def test_a_state_with_one_group_continues_in_several(tiny_model: Path) -> None:
    """States written before parameters had groups are read by name."""
    model = load_tiny(tiny_model)
    settings = settings_of(learning_rate=1e-3)
    old = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=settings.betas, weight_decay=0.0)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for seed, optimizer in enumerate((old, adamw(model, settings))):
        if seed:
            restore_optimizer(model.named_weights(), optimizer, state)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.step()
        state = capture_optimizer(model.named_weights(), optimizer)
    assert {int(values["step"]) for values in state.values()} == {2}
    twice = load_tiny(tiny_model)
    plain = torch.optim.AdamW(twice.parameters(), lr=1e-3, betas=settings.betas, weight_decay=0.0)
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        for weight in twice.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        plain.step()
    for mine, wanted, begun in zip(model.parameters(), twice.parameters(), before, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-7, rtol=1e-6)
        assert not torch.equal(mine, begun)
