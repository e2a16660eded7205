"""Settings of the batch that one step trains."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from trainer.config.section import Clearable, Section


class Packing(StrEnum):
    """The layout of sequences in rows (`batching/packing.py`): one in a row, several in a row, or every prefix that
    some of them share once."""

    PADDED = "padded"
    PACKED = "packed"
    TREE = "tree"


class BatchSettings(Section):
    """The batch that one step trains."""

    trajectories: PositiveInt = 128
    """Trajectories that a step waits for. Groups are never divided, so a step may get a few more."""
    at_least: PositiveInt = 2
    """After `wait_seconds`, a step also begins with fewer trajectories, if there are at least this many."""
    wait_seconds: Annotated[float, Field(gt=0, le=60)] = 30.0
    max_staleness: NonNegativeInt = 4
    """A trajectory is not trained if the policy of one of its tokens is more than this many versions older than the
    head. 0: synchronous training."""
    packing: Packing = Packing.TREE
    """A model that does not support this layout gets `padded`."""
    row_tokens: Annotated[PositiveInt | None, Clearable] = None
    """With `packed`: tokens in a row; a longer sequence gets a row of its own. None: 512, or
    `max_tokens_per_microbatch` if that is less."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Number of rows times their length, with padding, in one forward and backward pass; a micro-batch has at least
    one row."""

    def taken_by(self, packings: Collection[Packing]) -> BatchSettings:
        """Return these settings for a model that supports `packings`, one of which is `padded`."""
        return self if self.packing in packings else self.model_copy(update={"packing": Packing.PADDED})

    @property
    def packed_row_tokens(self) -> int:
        return self.row_tokens or min(512, self.max_tokens_per_microbatch)

    @model_validator(mode="after")
    def _consistent(self) -> BatchSettings:
        if self.at_least > self.trajectories:
            raise ValueError(f"at_least ({self.at_least}) cannot exceed trajectories ({self.trajectories})")
        if self.row_tokens is not None and self.packing is not Packing.PACKED:
            raise ValueError(
                f"row_tokens ({self.row_tokens}) is of rows that sequences are packed into, which packing ="
                f" {self.packing.value} does not do; leave it out, or set packing = packed"
            )
        if self.row_tokens is not None and self.row_tokens > self.max_tokens_per_microbatch:
            raise ValueError(
                f"row_tokens ({self.row_tokens}) cannot exceed max_tokens_per_microbatch"
                f" ({self.max_tokens_per_microbatch})"
            )
        return self
