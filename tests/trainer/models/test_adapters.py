"""Compare adapters with W + alpha / rank · B A in float64, and train several over one model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.models.archon.divided import elements
from tests.trainer.tiny import ALONE, GRPO, load_tiny, trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import (
    AdapterSettings,
    AlgorithmSettings,
    BatchSettings,
    Divergence,
    OptimizerSettings,
    Packing,
    TrainerSettings,
)
from trainer.errors import ConfigurationError, UnsupportedModel
from trainer.loading import Residents, load_adapters, load_learnt, reference_of
from trainer.models.adapters import AdaptedPolicy, Adapters
from trainer.update import Learner

IDS = (3, 9, 27, 17, 51, 5, 60, 2)


def adapters_of(directory: Path, **shapes: AdapterSettings) -> Adapters:
    return load_adapters(directory, TrainerSettings(), ALONE, shapes)


def randomise(policy: AdaptedPolicy, seed: int = 0) -> None:
    """Randomise B, which starts at zero, where half of the gradient is zero too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in policy.named_weights():
            weight.normal_(0, 0.2, generator=generator)


def logprobs_of(policy: Any, ids: tuple[int, ...] = IDS) -> Tensor:
    """Return the log-probability of every token after the first."""
    count = len(ids) - 1
    ids_1T = torch.tensor([ids])
    found: Tensor = policy(
        ids_1T, torch.arange(len(ids))[None], torch.arange(count), ids_1T[0, 1:], torch.ones(count), None
    )[0]
    return found


def reckoned(directory: Path, policy: AdaptedPolicy) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same log-probabilities by transformers' own forward pass in float64 with W + alpha / rank · B A, and
    the gradient of their sum."""
    network: Any = load_tiny(directory).inner.double()
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in policy.named_weights()}
    weights = dict(network.named_parameters())
    for name, low in leaves.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = leaves[name.replace("lora_A", "lora_B")]
            assert low.shape[0] == up.shape[1] == policy.shape.rank
            weights[f"{layer}.weight"] = (
                weights[f"{layer}.weight"].detach() + policy.shape.alpha / policy.shape.rank * up @ low
            )
    logits = torch.func.functional_call(network, weights, kwargs={"input_ids": torch.tensor([IDS])}).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(IDS)[1:, None])[:, 0]
    gradients = torch.autograd.grad(logprobs.sum(), list(leaves.values()))
    return logprobs.detach(), dict(zip(leaves, gradients, strict=True))


@hypothesis_settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rank=st.integers(1, 5),
    alpha=st.floats(0.5, 16),
    targets=st.sampled_from(["all-linear", ("q_proj", "v_proj"), ("mlp.down_proj",), ("layers.1.self_attn.o_proj",)]),
)
def test_log_probabilities_and_gradients_equal_those_of_the_low_rank_update(
    tiny_model: Path, rank: int, alpha: float, targets: Any
) -> None:
    policy = adapters_of(tiny_model, one=AdapterSettings(rank=rank, alpha=alpha, targets=targets))["one"]
    randomise(policy)
    wanted, gradients = reckoned(tiny_model, policy)
    found = logprobs_of(policy)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.autograd.backward(found.sum())
    assert gradients
    for name, weight in policy.named_weights():
        assert weight.grad is not None
        apart = float((weight.grad.double() - gradients[name]).norm() / gradients[name].norm())
        assert apart < 1e-4, (name, apart)  # rounding of float32: sums of terms of either sign
    assert all(
        weight.grad is None and not weight.requires_grad
        for name, weight in policy.adapters.model.inner.named_parameters()
        if ".lora_" not in name
    )


def batch_of(algorithm: Algorithm) -> list[MiniBatch]:
    members = [
        trajectory(turn([4 + index, 20, 7 + 2 * index][: 2 + index % 2], logprobs=(-3.0,) * (2 + index % 2)))
        for index in range(6)
    ]
    members = [trajectory(each.turns[0], reward=float(index % 2)) for index, each in enumerate(members)]
    groups = (0,) * 6
    advantages = assign(members, list(groups), algorithm, RunningMeans.fresh(0.9))
    batch = Batch(trajectories=tuple(members), groups=groups, base_version=0)
    settings = BatchSettings(packing=Packing.PACKED, row_tokens=16, max_tokens_per_microbatch=16)
    return mini_batches(batch, advantages.turns, linearise(members), settings, algorithm)


def learner_of(policy: AdaptedPolicy, algorithm: Algorithm) -> Learner:
    reference = policy.adapters.base if algorithm.has_reference else None
    return Learner(policy, algorithm, OptimizerSettings(learning_rate=1e-2), ALONE, reference)


def copies(policy: AdaptedPolicy) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in policy.named_weights()}


def test_adapters_over_one_model_learn_as_if_they_were_alone(tiny_model: Path) -> None:
    shapes = {
        "one": AdapterSettings(rank=2),
        "other": AdapterSettings(rank=3, alpha=6, targets=("q_proj", "up_proj")),
    }
    held = resolve(AlgorithmSettings(kl_coefficient=0.1, mini_batches=2))
    together = adapters_of(tiny_model, **shapes)
    base = {name: weight.detach().clone() for name, weight in together.model.inner.named_parameters()}
    learners = {name: learner_of(together[name], held if name == "one" else GRPO) for name in shapes}
    alone = {name: adapters_of(tiny_model, **{name: shape})[name] for name, shape in shapes.items()}
    single = {name: learner_of(policy, held if name == "one" else GRPO) for name, policy in alone.items()}
    for name in ("one", "other", "other", "one"):
        algorithm = held if name == "one" else GRPO
        other = next(each for each in shapes if each != name)
        before = copies(together[other])
        outcomes = [learners[name].update(batch_of(algorithm)), single[name].update(batch_of(algorithm))]
        assert outcomes[0].loss == outcomes[1].loss
        assert all(torch.equal(weight, before[key]) for key, weight in together[other].named_weights())
    for name in shapes:
        assert learners[name].steps == single[name].steps > 0
        assert all(torch.equal(weight, copies(together[name])[key]) for key, weight in alone[name].named_weights())
    for name, weight in together.model.inner.named_parameters():
        assert ".lora_" in name or torch.equal(weight, base[name])


def test_the_reference_is_the_base_without_a_second_model(tiny_model: Path) -> None:
    settings = TrainerSettings(adapter=AdapterSettings(rank=2))
    policy = load_learnt(tiny_model, settings, ALONE)
    assert isinstance(policy, AdaptedPolicy)
    reference = reference_of(policy, tiny_model, settings, ALONE)
    plain = logprobs_of(load_tiny(tiny_model)).detach()
    assert torch.equal(logprobs_of(policy).detach(), plain), "B is zero in the beginning"
    randomise(policy)
    assert not torch.allclose(logprobs_of(policy), plain, atol=1e-2)
    assert torch.equal(logprobs_of(reference).detach(), plain)
    kl = resolve(AlgorithmSettings(kl_coefficient=0.5, kl_form=Divergence.K2))
    outcome = learner_of(policy, kl).update(batch_of(kl))
    assert outcome.tokens is not None
    twin = Learner(
        load_learnt(tiny_model, settings, ALONE),
        kl,
        OptimizerSettings(learning_rate=1e-2),
        ALONE,
        load_tiny(tiny_model),
    )
    randomise(twin.model)  # type: ignore[arg-type]
    assert twin.update(batch_of(kl)).loss == pytest.approx(outcome.loss, abs=1e-6)
    for (name, weight), (_, wanted) in zip(policy.named_weights(), twin.model.named_weights(), strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-5, msg=name)


def test_a_new_adapter_depends_only_on_the_seed(tiny_model: Path) -> None:
    drawn = []
    for seed in (0, 0, 1):
        settings = TrainerSettings(seed=seed, adapter=AdapterSettings(rank=2))
        policy = load_learnt(tiny_model, settings, ALONE)
        assert isinstance(policy, AdaptedPolicy)
        torch.rand(7)  # nothing depends on the process's own random generator
        first = copies(policy)
        randomise(policy)
        policy.load_base(tiny_model)
        assert all(torch.equal(weight, first[name]) for name, weight in policy.named_weights())
        drawn.append(first)
    name = next(name for name in drawn[0] if "lora_A" in name)
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])
    assert 0 < float(drawn[0][name].abs().max()) <= drawn[0][name].shape[1] ** -0.5


def test_dropout_applies_only_to_training_passes(tiny_model: Path) -> None:
    policy = adapters_of(tiny_model, one=AdapterSettings(rank=4, dropout=0.5))["one"]
    randomise(policy)
    torch.manual_seed(0)
    learnt = [logprobs_of(policy).detach() for _ in range(2)]
    assert not torch.equal(*learnt)
    with torch.no_grad():
        looked = [logprobs_of(policy) for _ in range(2)]
    assert torch.equal(*looked)
    torch.testing.assert_close(looked[0].double(), reckoned(tiny_model, policy)[0], atol=1e-5, rtol=1e-5)


def test_targets_missing_from_the_model_are_refused(tiny_model: Path) -> None:
    for targets, said in [
        (("q_proj", "query"), "no linear layers called 'query'; it has down_proj, gate_proj, k_proj"),
        (("embed_tokens",), "no linear layers called 'embed_tokens'"),
        (("lm_head",), "'lm_head' is tied to the embedding"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            adapters_of(tiny_model, one=AdapterSettings(targets=targets))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises((ConfigurationError, UnsupportedModel)):
        adapters_of(tmp_path, one=AdapterSettings())


@pytest.mark.parametrize("name", ["one", "", "a.b", "lora_x"])
def test_invalid_target_names_are_refused(tiny_model: Path, name: str) -> None:
    adapters = adapters_of(tiny_model, one=AdapterSettings(rank=1))
    with pytest.raises(ValueError, match="cannot be the name of an adapter"):
        adapters.add(name, AdapterSettings(rank=1), 0)


def test_an_adapter_can_be_added_later(tiny_model: Path) -> None:
    """Adding an adapter while another one is trained leaves that one active."""
    adapters = adapters_of(tiny_model, one=AdapterSettings(rank=2))
    randomise(adapters["one"])
    before = logprobs_of(adapters["one"]).detach()
    adapters.add("two", AdapterSettings(rank=1), 5)
    assert list(adapters) == ["one", "two"]
    trainable = {name for name, weight in adapters.model.inner.named_parameters() if weight.requires_grad}
    assert trainable
    assert all(".one." in name for name in trainable)
    assert torch.equal(logprobs_of(adapters["one"]).detach(), before)
    assert torch.equal(logprobs_of(adapters["two"]).detach(), logprobs_of(adapters.base).detach())


def test_adapters_of_one_shape_share_a_slot_and_change_nothing_of_each_other(tiny_model: Path) -> None:
    """The tensors of the one that is not in use are set aside, and come back bit for bit."""
    residents = Residents()
    one, two, other = (
        load_learnt(tiny_model, TrainerSettings(seed=seed, adapter=AdapterSettings(rank=rank)), ALONE, residents)
        for seed, rank in ((1, 2), (2, 2), (3, 4))
    )
    assert isinstance(one, AdaptedPolicy)
    assert isinstance(two, AdaptedPolicy)
    assert isinstance(other, AdaptedPolicy)
    assert one.adapters.model is two.adapters.model is other.adapters.model
    base = sum(weight.numel() for weight in load_tiny(tiny_model).parameters())
    sizes = [sum(tensor.numel() for tensor in policy.tensors) for policy in (one, two, other)]
    assert elements([one, two, other]) == base + sum(sizes)

    learners = [Learner(policy, GRPO, OptimizerSettings(learning_rate=1e-2), ALONE) for policy in (one, two)]
    randomise(two)
    before, scored = [tensor.clone() for tensor in two.tensors], logprobs_of(two).detach()
    assert learners[0].update(batch_of(GRPO)).stepped
    assert all(torch.equal(tensor, was) for tensor, was in zip(two.tensors, before, strict=True))
    assert torch.equal(logprobs_of(two).detach(), scored)
    alone = load_learnt(tiny_model, TrainerSettings(seed=1, adapter=AdapterSettings(rank=2)), ALONE)
    Learner(alone, GRPO, OptimizerSettings(learning_rate=1e-2), ALONE).update(batch_of(GRPO))
    for (name, weight), (_, wanted) in zip(one.named_weights(), alone.named_weights(), strict=True):
        assert torch.equal(weight, wanted), name


def test_a_base_is_freed_with_its_last_adapter(tiny_model: Path) -> None:
    residents, settings = Residents(), TrainerSettings(adapter=AdapterSettings(rank=2))
    one, two = (residents.adapter(tiny_model, settings, ALONE) for _ in range(2))
    randomise(two)
    kept = logprobs_of(two).detach()
    residents.remove(one)
    assert torch.equal(logprobs_of(two).detach(), kept)
    third = residents.adapter(tiny_model, settings, ALONE)
    assert third.adapters is two.adapters
    assert torch.equal(logprobs_of(two).detach(), kept)
    model = weakref.ref(two.adapters.model)
    residents.remove(two)
    residents.remove(third)
    del one, two, third
    gc.collect()
    assert model() is None
