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
    """What one step takes."""

    trajectories: PositiveInt = 128
    """About how many trajectories a step waits for; whole groups, so it may be a few more."""
    at_least: PositiveInt = 2
    """After `wait_seconds`, a step is made of what is there if it is this many."""
    wait_seconds: Annotated[float, Field(gt=0, le=60)] = 30.0
    max_staleness: NonNegativeInt = 4
    """Versions between a token's policy and the head beyond which its trajectory is not trained; 0: synchronous."""
    packing: Packing = Packing.TREE
    """A model that does not take this layout gets `padded`."""
    row_tokens: Annotated[PositiveInt | None, Clearable] = None
    """`packed`: rows of this many tokens; a longer sequence gets a row of its own. None: 512, or
    `max_tokens_per_microbatch` if that is less."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Rows times their length, padding included, in one forward and backward; one row at least."""

    def taken_by(self, packings: Collection[Packing]) -> BatchSettings:
        """The same for a model that takes these packings, of which `padded` is one."""
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
