"""What happens when a step does not fit into memory: it is made again in smaller parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.config import BatchSettings
from trainer.errors import MemoryExhausted, StepTooLarge, TrainerError
from trainer.intake.packing import MiniBatch
from trainer.intake.sequences import TrainingSequence
from trainer.parallel.mesh import Ranks


class MicroBatchMemory:
    """How large micro-batches may be: as configured, and less once they were too large, for as long as this process
    lives. Losses have explicit denominators, so the gradient is the same whatever the size.

    The whole step is begun again from the head, since part of a gradient, or some of its optimiser steps, may have
    been made. A rank of several cannot leave the collectives that its peers wait in: there it is the end, which the
    launcher makes everybody's.
    """

    def __init__(self, settings: BatchSettings, ranks: Ranks) -> None:
        self.settings = settings
        self._ranks = ranks
        self._splits = 0

    def take_splits(self) -> int:
        """How many times micro-batches were made smaller since this was asked."""
        splits, self._splits = self._splits, 0
        return splits

    def refused(
        self, mini_batches: Sequence[MiniBatch], sequences: Sequence[TrainingSequence], said: str
    ) -> TrainerError:
        """What to raise. Micro-batches are half as large from now on, or of one sequence."""
        largest = max(part.input_ids_BT.numel() for mini_batch in mini_batches for part in mini_batch.micro_batches)
        longest = max(len(sequence.ids) for sequence in sequences)
        if self._ranks.size > 1:
            return MemoryExhausted(
                f"rank {self._ranks.rank} of {self._ranks.size} is out of memory with micro-batches of {largest}"
                f" tokens: set trainer.batch.max_tokens_per_microbatch to {max(longest, largest // 2)} or less"
                f" ({said})"
            )
        bound = largest // 2
        if largest <= longest or bound >= self.settings.max_tokens_per_microbatch:
            return MemoryExhausted(
                f"{largest} tokens that cannot be divided do not fit into memory: set"
                " trainer.activation_checkpointing or trainer.precision = bfloat16, train on several ranks, or keep"
                f" sessions shorter ({said})"
            )
        rows = self.settings.row_tokens
        smaller = {"max_tokens_per_microbatch": bound, "row_tokens": None if rows is None else min(rows, bound)}
        self.settings = self.settings.model_copy(update=smaller)
        self._splits += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return StepTooLarge(
            f"out of memory with micro-batches of {largest} tokens; from now on they are of {bound} at the most"
            f" ({said})"
        )
