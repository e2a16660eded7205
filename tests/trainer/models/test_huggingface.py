from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from structlog.testing import capture_logs

from tests.small_models import SMALL, small_qwen3
from tests.trainer.tiny import ALONE, GRPO, load_tiny, trajectory, turn
from trainer.algorithm.logprobs import token_logprobs
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, pack
from trainer.batching.sequences import linearise
from trainer.config import BatchSettings, Packing, Precision, TrainerSettings
from trainer.errors import UnsupportedModel
from trainer.loading import load_trained
from trainer.models.huggingface import PolicyModel, load_policy, resolve_directory


def score(model: PolicyModel, batch: MicroBatch) -> torch.Tensor:
    logprobs_N, _ = model(
        batch.input_ids_BT, batch.position_ids_BT, batch.predictor_N, batch.targets_N, batch.temperature_N
    )
    assert isinstance(logprobs_N, torch.Tensor)
    return logprobs_N


def test_packed_log_probabilities_and_gradients_equal_single_ones(tiny_model: Path) -> None:
    model = load_tiny(tiny_model)
    inner: Any = model.inner
    generator = torch.Generator().manual_seed(1)
    members = []
    for length in (3, 17, 9, 5, 12, 30, 1, 8):
        output = torch.randint(0, 64, (length,), generator=generator).tolist()
        prompt = torch.randint(0, 64, (4,), generator=generator).tolist()
        members.append(trajectory(turn(output, prompt=prompt, temperature=0.5 + length / 20)))
    batch = Batch(trajectories=tuple(members), groups=tuple(range(8)), base_version=0)
    settings = BatchSettings(packing=Packing.PACKED, row_tokens=48, max_tokens_per_microbatch=128)
    packed = pack(batch, [[1.0]] * 8, linearise(members), settings, GRPO)
    assert len(packed) < len(members)
    assert any(micro_batch.input_ids_BT.shape[0] > 1 for micro_batch in packed)

    single: dict[int, torch.Tensor] = {}
    for index, member in enumerate(members):
        node = member.turns[0]
        ids = torch.tensor([*node.prompt_ids, *node.output_ids])
        logits = inner(input_ids=ids[None], use_cache=False).logits[0, len(node.prompt_ids) - 1 : -1]
        logprobs = (logits / node.temperature).log_softmax(-1)
        single[index] = logprobs.gather(-1, torch.tensor(node.output_ids)[:, None])[:, 0]
        torch.autograd.backward(single[index].sum() * (index + 1))
    wanted = {name: parameter.grad for name, parameter in model.named_weights()}
    model.zero_grad(set_to_none=True)

    for micro_batch in packed:
        found_N = score(model, micro_batch)
        torch.autograd.backward((found_N * (micro_batch.trajectory_N + 1)).sum())
        for index in set(micro_batch.trajectory_N.tolist()):
            gap = (found_N[micro_batch.trajectory_N == index] - single[index]).abs().max()
            assert gap < 1e-5
    for name, parameter in model.named_weights():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-4, rtol=1e-4)


def test_activation_checkpointing_changes_no_gradient(tiny_model: Path) -> None:
    members = [trajectory(turn([4, 5, 6, 7])), trajectory(turn([9, 8]))]
    batch = Batch(trajectories=tuple(members), groups=(0, 1), base_version=0)
    (micro_batch,) = pack(batch, [[1.0]] * 2, linearise(members), BatchSettings(), GRPO)
    gradients = []
    for checkpointing in (False, True):
        model = load_policy(tiny_model, Precision.FLOAT32, token_logprobs, activation_checkpointing=checkpointing)
        recomputed: list[int] = []
        model.layers[0].get_submodule("input_layernorm").register_forward_pre_hook(
            lambda *_, seen=recomputed: seen.append(1)
        )
        torch.autograd.backward(score(model, micro_batch).sum())
        assert len(recomputed) == (2 if checkpointing else 1)
        gradients.append([parameter.grad for _, parameter in model.named_weights()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_bfloat16_computes_coarsely_over_float32_weights(tiny_model: Path) -> None:
    members = [trajectory(turn([4, 5, 6, 7]))]
    batch = Batch(trajectories=tuple(members), groups=(0,), base_version=0)
    (micro_batch,) = pack(batch, [[1.0]], linearise(members), BatchSettings(), GRPO)
    exact = load_tiny(tiny_model)
    coarse = load_policy(tiny_model, Precision.BFLOAT16, token_logprobs, activation_checkpointing=False)
    gap = (score(exact, micro_batch) - score(coarse, micro_batch)).abs().max().item()
    assert 0 < gap < 0.2
    torch.autograd.backward(score(coarse, micro_batch).sum())
    assert {parameter.grad.dtype for parameter in coarse.parameters() if parameter.grad is not None} == {
        torch.float32
    }


def test_a_model_whose_packed_sequences_see_each_other_gets_padded_rows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.masking_utils

    assert load_tiny(tiny_model).packings == set(Packing)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    assert load_tiny(tiny_model).packings == {Packing.PADDED, Packing.TREE}


def test_a_model_with_masks_of_its_own_gets_no_trees(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.qwen3.modeling_qwen3 as qwen3

    make = cast("Any", qwen3).create_causal_mask

    def ignoring(*arguments: Any, **given: Any) -> Any:
        return make(*arguments, **{**given, "attention_mask": None})

    monkeypatch.setattr(qwen3, "create_causal_mask", ignoring)
    assert load_tiny(tiny_model).packings == {Packing.PADDED, Packing.PACKED}


def test_a_model_with_a_window_gets_padded_rows_with_a_warning(
    tmp_path: Path,
) -> None:
    """The window is longer than the rows of the test at the start."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    windows: list[tuple[Any, Any, frozenset[Packing]]] = [
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=128), frozenset({Packing.PADDED, Packing.PACKED})),
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None), frozenset(Packing)),
        (
            Qwen3ForCausalLM,
            Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=128, max_window_layers=1),
            frozenset({Packing.PADDED, Packing.PACKED}),
        ),
    ]
    for number, (kind, config, packings) in enumerate(windows):
        directory = tmp_path / str(number)
        kind(config).save_pretrained(directory)
        with capture_logs() as logs:
            model = load_trained(directory, TrainerSettings(), ALONE)
        assert model.packings == packings
        told = [{"asked": log["asked"], "used": log["used"]} for log in logs if log["log_level"] == "warning"]
        assert told == ([] if Packing.TREE in packings else [{"asked": "tree", "used": "padded"}])


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    model: Any = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0, tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="log-probabilities of padded sequences differ"):
        load_tiny(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        resolve_directory(str(tmp_path))


@pytest.mark.parametrize("backend", ["fsdp", "archon"])
def test_a_float32_head_brings_a_bfloat16_model_closer_to_float32(tmp_path: Path, backend: str) -> None:
    """The logits are large, like those of trained models, and the layers add little, so rounding in the head is most
    of the error."""
    model: Any = small_qwen3(vocab_size=64, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(0, 3.0)
    model.save_pretrained(tmp_path)
    members = [trajectory(turn(torch.randint(0, 64, (40,)).tolist())) for _ in range(4)]
    batch = Batch(trajectories=tuple(members), groups=(0, 1, 2, 3), base_version=0)
    (micro_batch,) = pack(batch, [[1.0]] * 4, linearise(members), BatchSettings(), GRPO)

    def scored(**changes: Any) -> torch.Tensor:
        settings = TrainerSettings.model_validate({"backend": backend, **changes})
        return score(load_trained(tmp_path, settings, ALONE), micro_batch)

    exact = scored()
    halved = {"precision": "bfloat16"}
    coarse, fine, by_default = (
        scored(**halved, head_precision="bfloat16"),
        scored(**halved, head_precision="float32"),
        scored(**halved),
    )
    assert fine.dtype == torch.float32
    assert torch.equal(fine, by_default)
    error, left = ((each - exact).abs().mean().item() for each in (coarse, fine))
    assert 0 < left < error / 3
    torch.autograd.backward(fine.sum())


def test_a_bfloat16_head_belongs_to_a_bfloat16_model() -> None:
    with pytest.raises(ValueError, match="head_precision = bfloat16 needs precision = bfloat16"):
        TrainerSettings.model_validate({"head_precision": "bfloat16"})
