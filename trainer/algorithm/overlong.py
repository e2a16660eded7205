"""The penalty on overlong answers (Yu et al. 2025, DAPO: soft overlong punishment) and the length where it begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import structlog
import torch
from torch import Tensor

from proxy.contract.trajectory import Trajectory
from trainer.algorithm.parts import Algorithm
from trainer.errors import ConfigurationError

TAIL_SHARE = 1 / 5
"""The default tail as a share of the bound: the paper penalises the last 4,096 of 20,480 tokens."""

_log = structlog.get_logger("trainer.overlong")


def overlong_penalty(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> Tensor:
    """Return −factor · min(1, max(0, length − (tokens − tail)) / tail) for each trajectory, as float64.

    `length` is that of the trajectory's longest answer. Without a bound on tokens there is no penalty.
    """
    tokens, tail = algorithm.overlong_tokens, algorithm.overlong_tail
    lengths_N = torch.tensor(
        [max((len(turn.output_ids) for turn in each.turns), default=0) for each in trajectories], dtype=torch.float64
    )
    if tokens is None or tail is None or not algorithm.overlong_factor:
        return torch.zeros_like(lengths_N)
    return -algorithm.overlong_factor * ((lengths_N - (tokens - tail)) / tail).clamp(0, 1)


def bounded(algorithm: Algorithm, max_new_tokens: int | None, context: int | None) -> Algorithm:
    """Return the algorithm with defaults for the penalty: `overlong_tokens` is the run's `max_new_tokens`, and
    `overlong_tail` is TAIL_SHARE of it.

    `context` is the largest number of tokens of a prompt and its answer together; None if the proxy does not tell.
    Without any bound, warn and remove the penalty. Raises ConfigurationError for a bound that no answer can reach.
    """
    if not algorithm.overlong_factor:
        return algorithm
    tokens = algorithm.overlong_tokens or max_new_tokens
    if tokens is None:
        _log.warning(
            "overlong answers are not penalised: the proxy does not say run.max_new_tokens; set"
            " trainer.algorithm.overlong_tokens, or update the proxy"
        )
        return dataclasses.replace(algorithm, overlong_factor=0.0)
    named = "run.max_new_tokens" if algorithm.overlong_tokens is None else "trainer.algorithm.overlong_tokens"
    if max_new_tokens is not None and tokens > max_new_tokens:
        raise ConfigurationError(
            f"{named}: {tokens} is above run.max_new_tokens ({max_new_tokens}), which no answer exceeds; leave it out"
            f" to follow run.max_new_tokens, or set it to {max_new_tokens} or less"
        )
    if context is not None and tokens >= context:
        remedy = f"set {named} below {context}"
        if algorithm.overlong_tokens is None:
            remedy += f", or trainer.algorithm.overlong_tokens below {context}"
        raise ConfigurationError(
            f"{named}: overlong answers are penalised up to {tokens} tokens, and the model's context is {context}"
            f" with the prompt, so that no answer is that long; {remedy}, or trainer.algorithm.overlong_factor = 0"
            " for no penalty"
        )
    tail = algorithm.overlong_tail or max(1, round(tokens * TAIL_SHARE))
    if tail >= tokens:
        raise ConfigurationError(
            f"trainer.algorithm.overlong_tail: {tail} must be below {named} ({tokens}), or answers of any length"
            " would be penalised; leave it out for a fifth of it"
        )
    return dataclasses.replace(algorithm, overlong_tokens=tokens, overlong_tail=tail)
