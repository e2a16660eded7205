"""Long lists of parameters in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")

# Databases bound the number of parameters of a statement; every supported one accepts this many.
_MOST = 500


def chunks(values: Sequence[_Value]) -> Iterator[list[_Value]]:
    """Yield the values in lists that fit into one statement as parameters."""
    return (list(values[start : start + _MOST]) for start in range(0, len(values), _MOST))
