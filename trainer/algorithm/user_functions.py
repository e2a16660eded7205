"""Load the functions in a user's files, and call them with their results checked.

Every failure is one line with the file, the line number and what is expected. Axes: N tokens, as in
`algorithm/custom.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm.custom import LossInputs, Session
from trainer.errors import UserFunctionFailed
from trainer.user_code import UserFunction

_ARGUMENT = {"loss": "inputs", "advantage": "sessions", "filter": "sessions"}
# Largest number of characters of a failure's message, because an error's text may contain whole tensors.
_LONGEST = 600


def load(part: str, function: UserFunction) -> Callable[[Any], Any]:
    """Load the function that the configuration names as `part`. Raises UserFunctionFailed."""
    found = getattr(_module(function.file, function.sha256), function.name, None)
    if not callable(found):
        defined = [name for name, each in vars(_module(function.file, function.sha256)).items() if _is_defined(each)]
        there = f"it defines {', '.join(defined)}" if defined else "it defines no function"
        raise UserFunctionFailed(f"{function.file}: there is no function {function.name!r} in it; {there}")
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError) as error:
        raise UserFunctionFailed(
            f"{_place(function, found)}: {function.name} must take one argument,"
            f" `def {function.name}({_ARGUMENT[part]}):` ({error})"
        ) from error
    return found  # type: ignore[no-any-return]


def call_loss(function: UserFunction, inputs: LossInputs) -> Tensor:
    """Return the terms of the N tokens in the dtype of their log-probabilities. Raises UserFunctionFailed."""
    found = load("loss", function)
    terms_N = _called(function, found, inputs)
    count = inputs.logprobs_N.numel()
    expected = f"expected a tensor of shape ({count},), one term per token"
    where = _place(function, found)
    if not isinstance(terms_N, Tensor):
        raise UserFunctionFailed(f"{where}: {function.name} returned {_kind(terms_N)}; {expected}")
    if terms_N.shape != inputs.logprobs_N.shape:
        hint = ": return the terms, not their mean or sum" if terms_N.dim() == 0 else ""
        raise UserFunctionFailed(
            f"{where}: {function.name} returned a tensor of shape {tuple(terms_N.shape)}; {expected}{hint}"
        )
    if not terms_N.is_floating_point():
        raise UserFunctionFailed(f"{where}: {function.name} returned a tensor of {terms_N.dtype}; expected floats")
    finite_N = terms_N.detach().isfinite()
    if not bool(finite_N.all()):
        wrong = int((~finite_N).nonzero()[0, 0])
        raise UserFunctionFailed(
            f"{where}: {function.name} returned {terms_N[wrong].item()} for {int((~finite_N).sum())} of {count}"
            f" tokens; the first one has the log-probability {inputs.logprobs_N[wrong].item():.6g}, the proximal one"
            f" {inputs.proximal_N[wrong].item():.6g} and the advantage {inputs.advantages_N[wrong].item():.6g}"
        )
    return terms_N.to(inputs.logprobs_N.dtype)


def call_advantage(function: UserFunction, sessions: Sequence[Session]) -> tuple[tuple[float, ...], ...]:
    """Return one number for each turn of each session. Raises UserFunctionFailed."""
    found = load("advantage", function)
    values = _called(function, found, sessions)
    where = _place(function, found)
    rows = _one_each(where, function, values, sessions, "a list with one number per turn")
    for number, (row, session) in enumerate(zip(rows, sessions, strict=True)):
        turns = len(session.turns)
        numbers = row.tolist() if isinstance(row, Tensor) else row
        if not isinstance(numbers, Sequence) or len(numbers) != turns:
            raise UserFunctionFailed(
                f"{where}: {function.name} returned {_kind(row)} for session {number}, which has {turns} turns;"
                " expected a list with one number per turn"
            )
        for value in numbers:
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise UserFunctionFailed(
                    f"{where}: {function.name} returned {value!r:.80} for a turn of session {number}; expected a"
                    " finite number"
                )
        rows[number] = tuple(float(value) for value in numbers)
    return tuple(rows)


def call_filter(function: UserFunction, sessions: Sequence[Session]) -> tuple[bool, ...]:
    """Return for each session whether it is kept. Raises UserFunctionFailed."""
    found = load("filter", function)
    values = _called(function, found, sessions)
    where = _place(function, found)
    kept = _one_each(where, function, values, sessions, "True or False")
    for number, value in enumerate(kept):
        if not isinstance(value, bool):
            raise UserFunctionFailed(
                f"{where}: {function.name} returned {value!r:.80} for session {number}; expected True or False"
            )
    return tuple(kept)


@cache
def _module(file: str, sha256: str) -> ModuleType:
    """Execute the file once per process. Raises UserFunctionFailed, also if its content is not that of the
    configuration's SHA-256."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise UserFunctionFailed(f"cannot read {file}: {error.strerror or error}") from error
    if (now := hashlib.sha256(content).hexdigest()) != sha256:
        raise UserFunctionFailed(
            f"{file} has another content than the configuration names: its SHA-256 is {now}, expected {sha256}"
        )
    module = ModuleType(f"base_rl_user_{sha256[:16]}")
    module.__file__ = file
    # Dataclasses and pickles look their module up by its name.
    sys.modules[module.__name__] = module
    try:
        exec(compile(content, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the configuration asks for it
    except SyntaxError as error:
        raise UserFunctionFailed(f"{file}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise UserFunctionFailed(f"{_raised_at(file, error)} while the file was read") from error
    return module


def _called(function: UserFunction, found: Callable[[Any], Any], argument: object) -> Any:
    try:
        return found(argument)
    except torch.OutOfMemoryError:
        raise  # the trainer repeats the step in smaller parts
    except (Exception, SystemExit) as error:
        raise UserFunctionFailed(f"{_raised_at(function.file, error)} in {function.name}") from error


def _one_each(
    where: str, function: UserFunction, values: object, sessions: Sequence[Session], what: str
) -> list[Any]:
    """Return the values as a list, one per session. Raises UserFunctionFailed; `what` describes an expected value."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != len(sessions):
        raise UserFunctionFailed(
            f"{where}: {function.name} returned {_kind(values)} for {len(sessions)} sessions; expected a list with"
            f" one entry per session, {what}"
        )
    return list(listed)


def _raised_at(file: str, error: BaseException) -> str:
    """Describe an error with the innermost line of the user's file that it passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f"{file}:{lines[-1]}" if lines else file
    said = f"{place}: {type(error).__name__}: {error}".replace("\n", " ")
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def _place(function: UserFunction, found: Callable[[Any], Any]) -> str:
    """Return the file of a function, with its first line if it is a Python function."""
    code = getattr(inspect.unwrap(found), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else function.file


def _kind(value: object) -> str:
    """Describe a value for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r:.80}" if isinstance(value, int | float | str) else type(value).__name__


def _is_defined(value: object) -> bool:
    return inspect.isfunction(value) and value.__module__.startswith("base_rl_user_")
