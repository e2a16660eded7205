"""torch.compile as the trainer uses it: functions that see many kinds of inputs and must stay compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Compiled variants per function: with and without gradient, with frozen weights, for one row and several, for dense
# and sparse layers, for every model in the process. Beyond torch's own limit of 8 it would silently run the function
# uncompiled: attention with a tensor of T × T for every head.
_GRAPHS = 64


def compiled(function: Callable[P, R], *, dynamic: bool | None = None) -> Callable[P, R]:
    """Return the function, compiled when it is first called. `dynamic`: sizes may change from the first call on;
    None: torch finds out at the second size."""
    torch.compiler.config.recompile_limit = _GRAPHS
    return torch.compile(function, dynamic=dynamic)


def why_not(error: Exception) -> str:
    """Return in one line why something could not be compiled: the kind of the error and the first line of its
    text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
