"""How rewards are combined."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from proxy.contract.reward import NameRule, SourceRule
from proxy.settings.section import Section

RewardNumber = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class RewardSettings(Section):
    """How entries about the same session, or the same turn, become one reward."""

    combine: NameRule = NameRule.WEIGHTED_SUM
    """How the values of several names become one, each multiplied by its weight. Names of weight 0 are left out."""
    sources: SourceRule = SourceRule.SUM
    """How the sources of one name are combined: the latest value of each, summed or averaged."""
    order: tuple[str, ...] = ()
    """`first_of` takes the first of these names that has a value."""
    low: RewardNumber | None = None
    high: RewardNumber | None = None
    required: tuple[Annotated[str, StringConstraints(min_length=1, max_length=128)], ...] = ()
    """A session is trainable once it, or one of its turns, has a reward of each of these names."""

    @model_validator(mode="after")
    def _fits_together(self) -> RewardSettings:
        if (self.combine is NameRule.FIRST_OF) != bool(self.order):
            raise ValueError('order and combine = "first_of" belong together: give both or neither')
        if len(set(self.order)) != len(self.order):
            raise ValueError("order has a name twice")
        if len(set(self.required)) != len(self.required):
            raise ValueError("required has a name twice")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low}, above high, which is {self.high}")
        return self
