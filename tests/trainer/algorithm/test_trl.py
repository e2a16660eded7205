"""Our losses against TRL's on the same model, batch and log-probabilities: value and every gradient.

TRL's side is its trainers' own loss code, called on a batch as their collators and generation would make it. Ours is
what a training step does: packed rows, chosen tokens, the loss and its backward pass.

Left out, as TRL computes them only while it generates: advantages (leave-one-out baselines, scaling by groups). Left
out, as one side does not have them: luspo, vespo, off-policy sequence masks and entropy masks of TRL; M2PO and
log-linear proximal policies of ours. TRL's distillation is of whole distributions, ours of drawn tokens. Its weight
on the divergence (`use_bias_correction_kl`) is off: it has a gradient, ours has none.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proxy.contract.trajectory import Trajectory
from tests.proxy.tokens.models import write_model
from tests.trainer.tiny import ALONE, load_tiny, save_tiny_model, trajectory, turn
from trainer.algorithm.imitation import negative_log_likelihood
from trainer.algorithm.kto import KtoInputs, kto_loss
from trainer.algorithm.preferences import PreferenceInputs, bradley_terry, preference_loss
from trainer.algorithm.presets import resolve
from trainer.batching.grouping import Batch
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing, PreferenceForm
from trainer.models.huggingface import PolicyModel
from trainer.update import Learner

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and accelerate about themselves

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (3, 1)]
OUTPUTS = [(10, 11, 12), (13, 14, 15, 16, 17), (18,), (19, 20, 21, 22)]
ADVANTAGES = [1.3, -0.7, 0.4, -1.1]
LONGEST = 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with a tokenizer, which TRL's trainers require."""
    directory = tmp_path_factory.mktemp("trl") / "base"
    write_model(directory)
    save_tiny_model(directory)
    return directory


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl") / "other"
    directory.mkdir()
    save_tiny_model(directory, seed=1)
    return directory


def configured(kind: type, directory: Path, **options: Any) -> Any:
    return kind(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )


@pytest.fixture(scope="module", name="trl")
def trl_library() -> Any:
    """Import TRL here, because that takes seconds."""
    return importlib.import_module("trl")


def their_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def some_data(**columns: Sequence[Any]) -> Any:
    datasets: Any = importlib.import_module("datasets")
    return datasets.Dataset.from_dict({name: list(values) for name, values in columns.items()})


def padded(rows: Sequence[Sequence[float]], *, left: bool, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    whole = [[*space, *row] if left else [*row, *space] for row, space in zip(rows, fill, strict=True)]
    return torch.tensor(whole, dtype=dtype)


def token_logprobs(model: PolicyModel) -> list[list[float]]:
    found = []
    for prompt, output in zip(PROMPTS, OUTPUTS, strict=True):
        ids = torch.tensor([*prompt, *output])
        with torch.no_grad():
            logprobs, _ = model(
                ids[None],
                torch.arange(len(ids))[None],
                torch.arange(len(prompt) - 1, len(ids) - 1),
                ids[len(prompt) :],
                torch.ones(len(output)),
            )
        found.append(logprobs.tolist())
    return found


def disturbed(logprobs: list[list[float]], by: float) -> list[list[float]]:
    """Perturb log-probabilities as if another policy had sampled: ratios are on both sides of every clip."""
    numbers = torch.Generator().manual_seed(3)
    return [[value + by * (torch.rand((), generator=numbers).item() - 0.5) for value in row] for row in logprobs]


@contextmanager
def gradients_of(named: Any) -> Iterator[dict[str, Tensor]]:
    """Return the sum of gradients over backward passes, even if they are cleared before the end."""
    total: dict[str, Tensor] = {}
    handles = []
    for name, parameter in named:

        def add(gradient: Tensor, name: str = name) -> None:
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient

        handles.append(parameter.register_hook(add))
    yield total
    for handle in handles:
        handle.remove()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert max(gradient.abs().max().item() for gradient in theirs.values()) > 1e-4, "nothing was compared"
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-6, rtol=1e-4)


def our_step(
    base: Path, algorithm: AlgorithmSettings, behaviour: list[list[float]], reference: Path | None
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient of one step of the learner, on rows of several answers each."""
    members: list[Trajectory] = [
        trajectory(turn(output, prompt=prompt, logprobs=logprobs))
        for prompt, output, logprobs in zip(PROMPTS, OUTPUTS, behaviour, strict=True)
    ]
    parts = resolve(algorithm)
    batch = Batch(trajectories=tuple(members), groups=(0, 0, 0, 0), base_version=0)
    settings = BatchSettings(packing=Packing.PACKED, row_tokens=16, max_tokens_per_microbatch=16)
    packed = mini_batches(batch, [(value,) for value in ADVANTAGES], linearise(members), settings, parts)
    assert len(packed[0].micro_batches) > 1
    model = load_tiny(base)
    held_to = load_tiny(reference).requires_grad_(False).eval() if reference is not None else None
    learner = Learner(model, parts, OptimizerSettings(), ALONE, held_to)
    with gradients_of(model.named_weights()) as gradients:
        outcome = learner.update(packed)
    return outcome.loss, gradients


def their_inputs(**more: Any) -> dict[str, Any]:
    """Return a batch as TRL's generation produces it: prompts padded on the left, completions on the right."""
    return {
        "prompt_ids": padded(PROMPTS, left=True, dtype=torch.long),
        "prompt_mask": padded([[1] * len(ids) for ids in PROMPTS], left=True, dtype=torch.long),
        "completion_ids": padded(OUTPUTS, left=False, dtype=torch.long),
        "completion_mask": padded([[1] * len(ids) for ids in OUTPUTS], left=False, dtype=torch.long),
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": torch.tensor(float(sum(map(len, OUTPUTS)))),
        **more,
    }


def their_loss(trainer: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Return the loss that TRL's trainer computes. Its public way to a loss, `train`, also steps the optimiser."""
    return trainer._compute_loss(trainer.model, inputs, **options)


def never_asked(**_: Any) -> list[float]:
    raise AssertionError("rewards are given")


def grpo_trainer(trl: Any, base: Path, **options: Any) -> Any:

    given: dict[str, Any] = {"num_generations": 4, "max_completion_length": LONGEST, "beta": 0.0, **options}
    trainer: Any = trl.GRPOTrainer(
        model=their_model(base),
        reward_funcs=never_asked,
        args=configured(trl.GRPOConfig, base, **given),
        train_dataset=some_data(prompt=["a"] * 4),
        processing_class=tokenizer_of(base),
    )
    trainer.current_gradient_accumulation_steps = 1  # set by its training loop at every step
    return trainer


CLIPPED = {"epsilon": 0.2, "epsilon_high": 0.28}
BEHAVIOUR = {"proximal": "behaviour", "mini_batches": 1}
SIMPLE = {"proximal": "recompute", "mini_batches": 1}
TOKENS = {"denominator": "tokens"}
ANSWERS = {"denominator": "answers"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", **CLIPPED}, {"preset": "grpo", **ANSWERS}),
    "bnpo": ({"loss_type": "bnpo", **CLIPPED}, {"preset": "grpo", **TOKENS}),
    "dapo": ({"loss_type": "dapo", **CLIPPED}, {"preset": "dapo"}),
    "dr_grpo": ({"loss_type": "dr_grpo", **CLIPPED}, {"preset": "dr_grpo", "constant_tokens": LONGEST}),
    "two_sided": ({"loss_type": "dapo", **CLIPPED, "delta": 1.4}, {"preset": "grpo", "dual_clip": 1.4}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"preset": "gspo", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"preset": "cispo", "clip_high": 0.2}),
    "sapo": ({"loss_type": "sapo"}, {"preset": "sapo", **ANSWERS}),
    "kl": (
        {"loss_type": "dapo", **CLIPPED, "beta": 0.3, "use_bias_correction_kl": False},
        {"preset": "grpo", "kl_coefficient": 0.3, "kl_form": "k3", "correction": "none"},
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_policy_losses(trl: Any, base: Path, other: Path, name: str) -> None:
    """Compare with TRL's `old_per_token_logps`, which are both our behaviour policy's and our proximal policy's."""
    theirs, ours = CASES[name]
    old = disturbed(token_logprobs(load_tiny(base)), 1.2)
    reference = other if name == "kl" else None
    algorithm = AlgorithmSettings.model_validate({**ours, **BEHAVIOUR})
    loss, gradients = our_step(base, algorithm, old, reference)
    trainer = grpo_trainer(trl, base, **theirs)
    more = {"old_per_token_logps": padded(old, left=False, dtype=torch.float32)}
    if reference is not None:
        logprobs = token_logprobs(load_tiny(reference))
        more["ref_per_token_logps"] = padded(logprobs, left=False, dtype=torch.float32)
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        value = their_loss(trainer, their_inputs(**more))
        torch.autograd.backward(value)
    assert loss == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    assert_same(gradients, wanted)


@pytest.mark.parametrize(
    ("correction", "bounds"),
    [
        ("truncate", {"correction_low": 0.8, "importance_cap": 1.3}),
        ("mask", {"correction_low": 0.8, "correction_high": 1.3}),
        ("sequence_truncate", {"correction_low": 0.8, "importance_cap": 1.7}),
        ("sequence_mask", {"correction_low": 0.8, "correction_high": 1.7}),
    ],
)
def test_corrections(trl: Any, base: Path, correction: str, bounds: dict[str, float]) -> None:
    """TRL computes the weight of the engine's log-probabilities during generation, so its formula is written out here
    and passed to its loss."""
    mode = correction if correction.startswith("sequence") else f"token_{correction}"
    low, high = bounds["correction_low"], bounds.get("correction_high", bounds.get("importance_cap", 0.0))
    now = token_logprobs(load_tiny(base))
    drawn = disturbed(now, 1.2)
    algorithm = AlgorithmSettings.model_validate({"preset": "dapo", "correction": correction, **bounds, **SIMPLE})
    loss, gradients = our_step(base, algorithm, drawn, None)
    difference = padded(now, left=False, dtype=torch.float64) - padded(drawn, left=False, dtype=torch.float64)
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        weight = ratio.clamp(min=low, max=high)
    else:
        weight = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    assert (weight == ratio).any(), "some are within the bounds"
    assert (weight != ratio).any(), "some are not"
    trainer = grpo_trainer(trl, base, loss_type="dapo", **CLIPPED, vllm_importance_sampling_mode=mode)
    trainer.use_vllm = True  # its loss applies the weight only with this setting
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        value = their_loss(trainer, their_inputs(importance_sampling_ratio=weight.float()))
        torch.autograd.backward(value)
    assert loss == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    assert_same(gradients, wanted)


def test_rloo(trl: Any, base: Path) -> None:
    """TRL's ratio is that of the whole answer, ours that of each token: at the policy that sampled, where RLOO is
    applied, both have the gradient of REINFORCE. The values differ by constants."""

    now = token_logprobs(load_tiny(base))
    algorithm = AlgorithmSettings.model_validate({"preset": "rloo", "denominator": "sequences"})
    _, gradients = our_step(base, algorithm, now, None)
    trainer: Any = trl.RLOOTrainer(
        model=their_model(base),
        reward_funcs=never_asked,
        args=configured(trl.RLOOConfig, base, num_generations=4, max_completion_length=LONGEST, beta=0.0),
        train_dataset=some_data(prompt=["a"] * 4),
        processing_class=tokenizer_of(base),
    )
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        inputs = their_inputs(old_logps=torch.tensor([sum(row) for row in now]))
        torch.autograd.backward(their_loss(trainer, inputs))
    assert_same(gradients, wanted)


def whole_inputs(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return a batch padded on the right, as TRL's collators pad."""
    return {
        "input_ids": padded(rows, left=False, dtype=torch.long),
        "attention_mask": padded([[1] * len(ids) for ids in rows], left=False, dtype=torch.long),
    }


def sums_of(model: PolicyModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    """Return the log-probability of each output after its prompt, all in one row, with gradient."""
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    owners: list[int] = []
    for owner, (prompt, output) in enumerate(rows):
        start = len(ids) + len(prompt)
        ids += [*prompt, *output]
        positions += range(len(prompt) + len(output))
        predictors += range(start - 1, start - 1 + len(output))
        owners += [owner] * len(output)
    predictor_N = torch.tensor(predictors)
    input_ids = torch.tensor([ids])
    logprobs_N, _ = model(
        input_ids, torch.tensor([positions]), predictor_N, input_ids[0][predictor_N + 1], torch.ones(len(predictors))
    )
    return torch.zeros(len(rows)).index_add(0, torch.tensor(owners), logprobs_N)


PAIRED = [(prompt, OUTPUTS[1 - place]) for place, prompt in enumerate(PROMPTS[:2])]
"""Rejected answers to the first two prompts; the chosen ones are `OUTPUTS`."""


@pytest.mark.parametrize(
    ("form", "loss_type", "smoothing", "pairs"),
    [
        (PreferenceForm.SIGMOID, "sigmoid", 0.0, 2),
        (PreferenceForm.SIGMOID_NORM, "sigmoid_norm", 0.0, 2),
        (PreferenceForm.IPO, "ipo", 0.0, 2),
        (PreferenceForm.SIGMOID, "aot", 0.2, 1),  # for one pair, TRL's aot equals the smoothed sigmoid
    ],
)
def test_preferences(
    trl: Any, base: Path, other: Path, form: PreferenceForm, loss_type: str, smoothing: float, pairs: int
) -> None:

    chosen = list(zip(PROMPTS, OUTPUTS, strict=True))[:pairs]
    rejected = PAIRED[:pairs]
    model, reference = load_tiny(base), load_tiny(other).requires_grad_(False)
    sums, held_to = sums_of(model, [*chosen, *rejected]), sums_of(reference, [*chosen, *rejected])
    lengths = torch.tensor([len(output) for _, output in [*chosen, *rejected]])
    found = preference_loss(
        PreferenceInputs(
            chosen_P=sums[:pairs],
            rejected_P=sums[pairs:],
            reference_chosen_P=held_to[:pairs],
            reference_rejected_P=held_to[pairs:],
            chosen_tokens_P=lengths[:pairs],
            rejected_tokens_P=lengths[pairs:],
            share_P=torch.full((pairs,), 1 / pairs),
        ),
        form,
        0.3,
        smoothing,
    )
    with gradients_of(model.named_weights()) as ours:
        torch.autograd.backward(found.loss)

    trainer: Any = trl.DPOTrainer(
        model=their_model(base),
        ref_model=their_model(other),
        args=configured(trl.DPOConfig, base, beta=0.3, loss_type=[loss_type], label_smoothing=smoothing),
        train_dataset=some_data(prompt=["a"], chosen=["b"], rejected=["c"]),
        processing_class=tokenizer_of(base),
    )
    masks = [[0] * len(prompt) + [1] * len(output) for prompt, output in [*chosen, *rejected]]
    inputs = whole_inputs([[*prompt, *output] for prompt, output in [*chosen, *rejected]])
    inputs["completion_mask"] = padded(masks, left=False, dtype=torch.long)
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        value = their_loss(trainer, inputs, return_outputs=False)
        torch.autograd.backward(value)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    assert_same(ours, wanted)


def test_kto(trl: Any, base: Path, other: Path) -> None:
    """The reference point uses answers after each other's prompts, paired as TRL pairs them."""
    kto: Any = importlib.import_module("trl.experimental.kto")
    desirable = [True, False, True, False]
    rows = list(zip(PROMPTS, OUTPUTS, strict=True))
    swapped = list(zip(PROMPTS, [OUTPUTS[-1], *OUTPUTS[:-1]], strict=True))
    model, reference = load_tiny(base), load_tiny(other).requires_grad_(False)
    inputs = KtoInputs(
        logprobs_E=sums_of(model, rows),
        reference_E=sums_of(reference, rows),
        mismatched_M=sums_of(model, swapped).detach(),
        mismatched_reference_M=sums_of(reference, swapped),
        desirable_E=torch.tensor(desirable),
        share_E=torch.full((len(rows),), 1 / len(rows)),
    )
    found = kto_loss(inputs, 0.3, 1.2, 0.8)
    assert found.point > 0
    with gradients_of(model.named_weights()) as ours:
        torch.autograd.backward(found.loss)

    weights = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    trainer: Any = kto.KTOTrainer(
        model=their_model(base),
        ref_model=their_model(other),
        args=configured(kto.KTOConfig, base, **weights),
        train_dataset=some_data(prompt=["a", "b"], completion=["b", "c"], label=[True, False]),
        processing_class=tokenizer_of(base),
    )

    def their_inputs(prefix: str, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Tensor]:
        whole = whole_inputs([[*prompt, *output] for prompt, output in pairs])
        masks = [[0] * len(prompt) + [1] * len(output) for prompt, output in pairs]
        whole["completion_mask"] = padded(masks, left=False, dtype=torch.long)
        return {f"{prefix}{name}": each for name, each in whole.items()}

    batch = {**their_inputs("", rows), **their_inputs("KL_", swapped), "label": torch.tensor(desirable)}
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        value = their_loss(trainer, batch, return_outputs=False)
        torch.autograd.backward(value)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    assert_same(ours, wanted)


def test_supervised(trl: Any, base: Path) -> None:

    rows = list(zip(PROMPTS, OUTPUTS, strict=True))
    tokens = sum(map(len, OUTPUTS))
    model = load_tiny(base)
    loss = negative_log_likelihood(sums_of(model, rows), torch.full((len(rows),), 1 / tokens))
    with gradients_of(model.named_weights()) as ours:
        torch.autograd.backward(loss)

    trainer: Any = trl.SFTTrainer(
        model=their_model(base),
        args=configured(trl.SFTConfig, base),
        train_dataset=some_data(prompt=["a"], completion=["b"]),
        processing_class=tokenizer_of(base),
    )
    inputs = whole_inputs([[*prompt, *output] for prompt, output in rows])
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, (prompt, output) in enumerate(rows):
        labels[row, len(prompt) : len(prompt) + len(output)] = torch.tensor(output)
    trainer.model.train()
    with gradients_of(trainer.model.named_parameters()) as wanted:
        value = trainer.compute_loss(trainer.model, {**inputs, "labels": labels})
        torch.autograd.backward(value)
    assert loss.item() == pytest.approx(value.item(), rel=1e-5)
    assert_same(ours, wanted)


def test_reward_model(trl: Any, base: Path) -> None:
    """Compare the loss alone, on the scores of TRL's own forward pass."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    classifier: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    classifier.config.pad_token_id = 0
    trainer: Any = trl.RewardTrainer(
        model=classifier,
        args=configured(trl.RewardConfig, base),
        train_dataset=some_data(prompt=["a"], chosen=["b"], rejected=["c"]),
        processing_class=tokenizer_of(base),
    )
    inputs = whole_inputs([[*prompt, *output] for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)])
    classifier.train()
    with gradients_of(classifier.named_parameters()) as wanted:
        value = trainer.compute_loss(classifier, dict(inputs))
        torch.autograd.backward(value)
    scores = classifier(**inputs).logits[:, 0]
    found = bradley_terry(scores[:2], scores[2:], torch.full((2,), 0.5))
    with gradients_of(classifier.named_parameters()) as ours:
        torch.autograd.backward(found.loss)
    assert found.loss.item() == pytest.approx(value.item(), rel=1e-6)
    assert_same(ours, wanted)
