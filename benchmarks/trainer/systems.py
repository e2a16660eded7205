"""One optimiser step of a workload, by our learner in each packing and by TRL's GRPO trainer.

Ours is everything that the trainer does between claim and publication: sessions to sequences, their layout, forward,
backward, clipping, AdamW, and the record of every token. TRL's is everything that its training loop does with a
generated batch: prompts padded on the left and completions on the right, to the longest of the batch; micro-batches
of `per_device_train_batch_size` rows (its default) through its `compute_loss` and backward; the same clipping and
AdamW. Tokens between answers are masked from its loss (`tool_mask`). Both have the same sequences, advantages and
denominator (all trained tokens), in float32 on the same threads, and neither recomputes activations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainer.workloads import VOCABULARY, Workload
from trainer.algorithm.presets import resolve
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import TrainingSequence, linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing, TrainerSettings
from trainer.loading import load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner, Outcome

Step = Callable[[], float]
"""A function that makes the step and returns the norm of its gradient."""

# so small that a step does not change the weights: every repetition computes the same
_OPTIMIZER = OptimizerSettings(learning_rate=1e-12)
_TOKENIZER = Path("agents_examples/calculator/checkpoint")


def save_model(directory: Path) -> int:
    """Save a random Qwen3, and return its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


class Ours:
    """Our learner on one workload."""

    def __init__(self, directory: Path, workload: Workload) -> None:
        ranks = Ranks(0, 1, torch.device("cpu"), None)
        model = load_trained(directory, TrainerSettings(), ranks)
        self._algorithm = resolve(AlgorithmSettings(mini_batches=1))
        self._learner = Learner(model, self._algorithm, _OPTIMIZER, ranks)
        self.workload = workload
        self.workload = workload.recorded(self._logprobs())

    def update(self, packing: Packing) -> Outcome:
        batch, advantages = self.workload.batch, self.workload.advantages
        sequences = linearise(batch.trajectories)
        packed = mini_batches(batch, advantages, sequences, BatchSettings(packing=packing), self._algorithm)
        return self._learner.update(packed)

    def step(self, packing: Packing) -> Step:
        return lambda: self.update(packing).gradient_norm

    @property
    def trained_tokens(self) -> int:
        return sum(sequence.trained_tokens for sequence in linearise(self.workload.batch.trajectories))

    def _logprobs(self) -> dict[tuple[int, int], list[float]]:
        """Return the log-probabilities of the policy itself, as if it had just acted."""
        tokens = self.update(Packing.PADDED).tokens
        assert tokens is not None
        found: dict[tuple[int, int], list[float]] = {}
        columns = (tokens.trajectory_N.tolist(), tokens.turn_N.tolist(), tokens.logprobs_N.tolist())
        for trajectory, turn, logprob in zip(*columns, strict=True):
            found.setdefault((trajectory, turn), []).append(logprob)
        return found


def their_step(directory: Path, workload: Workload, scratch: Path) -> Step:
    """TRL's trainer with its own defaults, except for what its step must have in common with ours."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    tokenizer: Any = AutoTokenizer.from_pretrained(_TOKENIZER)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sequences = linearise(workload.batch.trajectories)
    rows = trl.GRPOConfig(output_dir=str(scratch), use_cpu=True, bf16=False).per_device_train_batch_size
    parts = -(-len(sequences) // rows)
    trainer: Any = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        reward_funcs=_never_asked,
        args=trl.GRPOConfig(
            output_dir=str(scratch),
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            gradient_accumulation_steps=parts,
            epsilon_high=0.28,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * rows * parts}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = parts
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_OPTIMIZER.learning_rate, betas=_OPTIMIZER.betas, weight_decay=0.0, fused=True
    )

    def step() -> float:
        inputs = _padded(sequences, workload)
        for first in range(0, len(sequences), rows):
            part = {name: each if each.dim() == 0 else each[first : first + rows] for name, each in inputs.items()}
            trainer.accelerator.backward(trainer.compute_loss(model, part))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _OPTIMIZER.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return step


def _padded(sequences: Sequence[TrainingSequence], workload: Workload) -> dict[str, Tensor]:
    prompts, completions, trained = [], [], []
    for sequence in sequences:
        first = sequence.spans[0].start
        prompts.append(sequence.ids[:first])
        completions.append(sequence.ids[first:])
        mask = [0] * (len(sequence.ids) - first)
        for span in sequence.spans:
            mask[span.start - first : span.start - first + span.length] = [1] * span.length
        trained.append(mask)
    return {
        "prompt_ids": _filled(prompts, left=True),
        "prompt_mask": _filled([[1] * len(each) for each in prompts], left=True),
        "completion_ids": _filled(completions, left=False),
        "completion_mask": _filled([[1] * len(each) for each in completions], left=False),
        "tool_mask": _filled(trained, left=False),
        "advantages": torch.tensor([workload.advantages[each.trajectory][0] for each in sequences]),
        "num_items_in_batch": torch.tensor(float(sum(map(sum, trained)))),
    }


def _filled(rows: Sequence[Sequence[int]], *, left: bool) -> Tensor:
    width = max(map(len, rows))
    fill = [[0] * (width - len(row)) for row in rows]
    return torch.tensor([[*space, *row] if left else [*row, *space] for row, space in zip(rows, fill, strict=True)])


def _never_asked(**_: Any) -> list[float]:
    raise AssertionError("rewards are given")
