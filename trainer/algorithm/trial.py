"""Try a user's functions on made-up data, so that their faults are errors at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm.custom import LossInputs, Session, Turn
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.user_functions import call_advantage, call_filter, call_loss, load
from trainer.errors import ConfigurationError, UserFunctionFailed
from trainer.user_code import UserFunction

# Tokens of each made-up answer.
_LENGTHS = (1, 3, 5, 2)
_CLOSE = 1e-5


def try_functions(algorithm: Algorithm) -> None:
    """Raise ConfigurationError, naming setting, file and line, if a function of the algorithm cannot be used."""
    trials: dict[str, Callable[[UserFunction], None]] = {
        "filter": _try_filter,
        "advantage": _try_advantage,
        "loss": lambda function: _try_loss(function, has_reference=algorithm.has_divergence),
    }
    for part, trial in trials.items():
        function: UserFunction | None = getattr(algorithm, part)
        if function is None:
            continue
        during = ""
        try:
            load(part, function)
            during = " (in a trial on made-up data)"
            trial(function)
        except UserFunctionFailed as error:
            raise ConfigurationError(f"trainer.algorithm.{part}: {error}{during}") from error


def _try_loss(function: UserFunction, *, has_reference: bool) -> None:
    whole = made_up_tokens(_LENGTHS, has_reference=has_reference)
    before = _values(whole)
    terms_N = call_loss(function, whole)
    if any(not torch.equal(was, now) for was, now in zip(before, _values(whole), strict=True)):
        raise UserFunctionFailed(f"{function}: it changes its inputs in place; make new tensors instead")
    if not terms_N.requires_grad:
        raise UserFunctionFailed(
            f"{function}: what it returns has no gradient; compute it from inputs.logprobs_N, not from numbers or"
            " detached tensors"
        )
    gradients = torch.autograd.grad(terms_N.sum(), [whole.logprobs_N, whole.entropy_N], allow_unused=True)
    found = [gradient for gradient in gradients if gradient is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in found):
        raise UserFunctionFailed(
            f"{function}: its gradient is NaN or infinite, though what it returns is not; look for torch.where, sqrt"
            " or a division whose other branch is not finite"
        )
    if not any(bool((gradient != 0).any()) for gradient in found):
        raise UserFunctionFailed(f"{function}: its gradient is zero for every token: nothing would be learnt")
    if not torch.equal(terms_N, call_loss(function, whole)):
        raise UserFunctionFailed(f"{function}: it returns other terms for the same inputs; it must not draw anything")
    _check_answers_apart(function, whole, terms_N)


def _check_answers_apart(function: UserFunction, whole: LossInputs, terms_N: Tensor) -> None:
    """Raise UserFunctionFailed if an answer's terms depend on the other answers of its micro-batch."""
    for answer in range(len(_LENGTHS)):
        mine_N = whole.answer_N == answer
        columns: dict[str, Any] = {name: getattr(whole, name) for name in LossInputs.__slots__}
        parts: dict[str, Any] = {name: None if column is None else column[mine_N] for name, column in columns.items()}
        alone = LossInputs(**{**parts, "answer_N": torch.zeros_like(parts["answer_N"])})
        if (call_loss(function, alone) - terms_N[mine_N]).abs().max() > _CLOSE:
            raise UserFunctionFailed(
                f"{function}: the terms of an answer change with the other answers of its micro-batch, which are a"
                " matter of memory: do not average or normalise over the micro-batch (the trainer divides by the"
                " batch's denominator)"
            )


def _try_advantage(function: UserFunction) -> None:
    sessions = made_up_sessions()
    found = call_advantage(function, sessions)
    if found != call_advantage(function, sessions):
        raise UserFunctionFailed(
            f"{function}: it returns other advantages for the same sessions; it must not draw anything"
        )


def _try_filter(function: UserFunction) -> None:
    sessions = made_up_sessions()
    found = call_filter(function, sessions)
    if found != call_filter(function, sessions):
        raise UserFunctionFailed(f"{function}: it keeps other sessions of the same batch; it must not draw anything")


def made_up_tokens(lengths: tuple[int, ...], *, has_reference: bool) -> LossInputs:
    """Return tokens of answers of these lengths: ratios from 0.6 to 1.6, advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(0)
    count = sum(lengths)

    def near(values_N: Tensor) -> Tensor:
        return values_N + 0.25 * torch.randn(count, generator=generator).clamp(-2, 2)

    logprobs_N = -4 * torch.rand(count, generator=generator) - 0.01
    answer_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossInputs(
        logprobs_N=logprobs_N.requires_grad_(),
        entropy_N=(3 * torch.rand(count, generator=generator)).requires_grad_(),
        proximal_N=near(logprobs_N.detach()),
        behaviour_N=near(logprobs_N.detach()),
        reference_N=near(logprobs_N.detach()) if has_reference else None,
        advantages_N=torch.tensor([1.5, -1.0, 0.0, 0.3])[answer_N % 4],
        answer_N=answer_N,
        staleness_N=(answer_N % 3).float(),
    )


def made_up_sessions() -> tuple[Session, ...]:
    """Return a group of four, a session of its own, one with rewards of its turns alone, and equal rewards."""

    def turn(number: int, reward: float | None = None) -> Turn:
        output = tuple(range(10 + number, 14 + 2 * number))
        return Turn(
            parent=None if number == 0 else number - 1,
            prompt_ids=(1, 2, 3),
            output_ids=output,
            logprobs=tuple(-0.1 * (place + 1) for place in range(len(output))),
            temperature=1.0,
            trained=True,
            reward=reward,
        )

    def session(number: int, group: int, reward: float | None, turns: tuple[Turn, ...]) -> Session:
        return Session(id=f"trial-{number}", group=group, task="a task", reward=reward, turns=turns)

    rewards = [
        (0, 1.0),
        (0, 0.0),
        (0, -2.5),
        (0, 100.0),
        (1, 0.5),
        (3, 1.0),
        (3, 1.0),
    ]
    found = [
        session(number, group, reward, tuple(turn(place) for place in range(1 + number % 3)))
        for number, (group, reward) in enumerate(rewards)
    ]
    return (*found, session(len(found), 2, None, (turn(0, 0.0), turn(1, 1.0), turn(2))))


def _values(inputs: LossInputs) -> list[Tensor]:
    every: list[Any] = [getattr(inputs, name) for name in LossInputs.__slots__]
    return [each.detach().clone() for each in every if each is not None]
