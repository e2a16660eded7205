"""Steps that do not fit into memory: they are made again with smaller micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from trainer.batching.packing import MiniBatch
from trainer.batching.sequences import TrainingSequence
from trainer.config import BatchSettings
from trainer.errors import MemoryExhausted, RanksStartAgain, StepTooLarge, TrainerError
from trainer.parallel.mesh import Ranks
from trainer.runtime.restarts import Restarts, SmallerBound

_log = structlog.get_logger("trainer.memory")


class MicroBatchMemory:
    """The bound on the size of micro-batches: the configured one, or a smaller one after a step did not fit, for the
    life of this process. Losses have explicit denominators, so the gradient does not depend on the size.

    The whole step is begun again from the head, since parts of a gradient or some optimiser steps may have been
    made. One of several ranks cannot leave the collectives in which its peers wait. So all ranks end, and the
    launcher starts them again, once for a step, with the bound in `restarts` (None: no launcher would start them).
    """

    def __init__(
        self, settings: BatchSettings, ranks: Ranks, restarts: Restarts | None = None, run: str = ""
    ) -> None:
        self.settings = settings
        self._ranks = ranks
        self._restarts = restarts
        self._run = run
        self._before = None if restarts is None else restarts.granted_bound(run)
        self._splits = 0
        if self._before is not None:
            self._make_smaller(self._before.max_tokens_per_microbatch)
            if ranks.is_first:
                bound = self._before.max_tokens_per_microbatch
                _log.warning("out of memory before: the step is made in smaller micro-batches", most_tokens=bound)

    def take_splits(self) -> int:
        """Return how often micro-batches were made smaller since the last call."""
        splits, self._splits = self._splits, 0
        return splits

    def after_refusal(
        self, mini_batches: Sequence[MiniBatch], sequences: Sequence[TrainingSequence], version: int, said: str
    ) -> TrainerError:
        """Make micro-batches half as large from now on, or as large as one sequence, and return the error to raise
        in a step from `version`."""
        largest = max(part.input_ids_BT.numel() for mini_batch in mini_batches for part in mini_batch.micro_batches)
        longest = max(len(sequence.ids) for sequence in sequences)
        # Halved, not estimated: activations, fragmentation and other processes make estimates unreliable.
        bound = largest // 2
        if largest <= longest or bound >= self.settings.max_tokens_per_microbatch:
            return MemoryExhausted(
                f"{largest} tokens that cannot be divided do not fit into memory: set"
                " trainer.activation_checkpointing or trainer.precision = bfloat16, train on several ranks, or keep"
                f" sessions shorter ({said})"
            )
        if self._ranks.size > 1:
            return self._refused_by_one(largest, max(longest, bound), version, said)
        self._make_smaller(bound)
        # Blocks of the failed step's sizes are cached and would fragment the memory of the smaller ones.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return StepTooLarge(
            f"out of memory with micro-batches of {largest} tokens; from now on they are of {bound} at the most"
            f" ({said})"
        )

    def _refused_by_one(self, largest: int, bound: int, version: int, said: str) -> TrainerError:
        again = self._before is not None and self._before.version == version
        what = (
            f"rank {self._ranks.rank} of {self._ranks.size} is out of memory{' again' if again else ''} with"
            f" micro-batches of {largest} tokens"
        )
        if self._restarts is None or again:
            other = "" if again else f", or start the ranks by `base-rl train --nproc {self._ranks.size}`, which does"
            return MemoryExhausted(
                f"{what}: set trainer.batch.max_tokens_per_microbatch to {bound} or less{other} ({said})"
            )
        self._restarts.request(SmallerBound(run=self._run, version=version, max_tokens_per_microbatch=bound))
        return RanksStartAgain(f"{what}: all start again, with {bound} at the most ({said})")

    def _make_smaller(self, bound: int) -> None:
        rows = self.settings.row_tokens
        smaller = {"max_tokens_per_microbatch": bound, "row_tokens": None if rows is None else min(rows, bound)}
        self.settings = self.settings.model_copy(update=smaller)
        self._splits += 1
