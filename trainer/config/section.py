"""The base class of all sections, and the value "none", which clears an option."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PositiveFloat, Tag

CLEARED = "none"
"""The text that switches an option off, whatever value a preset, another layer or the defaults give it."""
NUMBER = "number"


def is_cleared(value: object) -> bool:
    """Return whether a value is the text "none". Members of some enumerations equal that text and do not count."""
    return type(value) is str and value == CLEARED


def _tag(value: object) -> str:
    return CLEARED if is_cleared(value) else NUMBER


def _without_cleared(value: object) -> object:
    return None if is_cleared(value) else value


Clearable = BeforeValidator(_without_cleared)
"""For options whose default is None: reads "none" as None, because TOML and the environment have no null."""
_Cleared = Annotated[Literal["none"], Tag(CLEARED)]
PositivePart = Annotated[Annotated[PositiveFloat, Tag(NUMBER)] | _Cleared, Discriminator(_tag)]
AboveOnePart = Annotated[Annotated[float, Field(gt=1), Tag(NUMBER)] | _Cleared, Discriminator(_tag)]
"""For parts of an algorithm: None means the preset's value, "none" no value."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
