"""The base class of all sections, and the value "none", which clears an option."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PositiveFloat, Tag

CLEARED = "none"
"""Written for an option that a preset, another layer or the defaults would set: it has no value."""
NUMBER = "number"


def is_cleared(value: object) -> bool:
    """Tell the text "none" from members of enumerations, some of which equal it."""
    return type(value) is str and value == CLEARED


def _tag(value: object) -> str:
    return CLEARED if is_cleared(value) else NUMBER


def _without_cleared(value: object) -> object:
    return None if is_cleared(value) else value


Clearable = BeforeValidator(_without_cleared)
"""For options whose default is None: "none" is None, so that a file or the environment can say so."""
_Cleared = Annotated[Literal["none"], Tag(CLEARED)]
PositivePart = Annotated[Annotated[PositiveFloat, Tag(NUMBER)] | _Cleared, Discriminator(_tag)]
AboveOnePart = Annotated[Annotated[float, Field(gt=1), Tag(NUMBER)] | _Cleared, Discriminator(_tag)]
"""Parts of an algorithm where None means the preset's value, and "none" no value."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
