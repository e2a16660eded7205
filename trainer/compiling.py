"""torch.compile as the trainer uses it: functions that see many kinds of inputs and must stay compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_GRAPHS = 64
"""Of a function: with and without gradient, of frozen weights, on one row and on several, of dense layers and sparse
ones, of every model in the process. Behind its own limit of 8 torch would compute the function uncompiled and say
nothing: attention with a tensor of T × T for every head."""


def compiled(function: Callable[P, R], *, dynamic: bool | None = None) -> Callable[P, R]:
    """Compiled where it is first called. `dynamic`: sizes may change from the first call on; None: when they do."""
    torch.compiler.config.recompile_limit = _GRAPHS
    return torch.compile(function, dynamic=dynamic)


def why_not(error: Exception) -> str:
    """What kept something from being compiled, in a line: the kind of the error and the first line that it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
