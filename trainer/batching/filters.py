"""Measures that recognise repetition and gibberish in a single answer: pure functions of its tokens.

Axes: L tokens of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby

from proxy.contract.claim import AnswerFault
from proxy.contract.trajectory import TrajectoryTurn
from proxy.contract.turn import LogprobConvention
from trainer.config import FilterSettings


def caught_by(turn: TrajectoryTurn, filters: FilterSettings) -> AnswerFault | None:
    """Return the fault for which a filter catches the turn's answer; None if none does.

    Redacted tokens are placeholders and are not measured. In a constrained answer a token without an alternative has
    probability 1, so its log-probabilities are no sign of repetition: only its ids are measured.
    """
    if not filters.is_on:
        return None
    ids = [turn.output_ids[position] for position in turn.learnt]
    logprobs: list[float] = []
    if turn.convention is not LogprobConvention.CONSTRAINED:
        logprobs = [turn.logprobs[position] for position in turn.learnt]
    share, certain, unlikely = filters.repeated_share, filters.certain_tokens, filters.gibberish_logprob
    if share is not None and repeated_share(ids, filters.repeated_ngram) > share:
        return AnswerFault.REPETITION
    if certain is not None and longest_certain_run(logprobs, filters.certain_probability) >= certain:
        return AnswerFault.REPETITION
    if unlikely is not None and logprobs and lowest_mean_logprob(logprobs, filters.gibberish_window) < unlikely:
        return AnswerFault.GIBBERISH
    return None


def repeated_share(ids: Sequence[int], n: int) -> float:
    """Return the share of the answer's n-grams that also occur earlier in it: 1 − distinct / all.

    0 for an answer of less than n + 1 tokens. It is computed from token ids, so it needs no tokenizer.
    """
    count = len(ids) - n + 1
    if count < 2:
        return 0.0
    distinct = len(set(zip(*(ids[start : start + count] for start in range(n)), strict=True)))
    return 1 - distinct / count


def longest_certain_run(logprobs_L: Sequence[float], probability: float) -> int:
    """Return the length of the longest run of tokens that were each drawn with more than this probability.

    A model in a loop is nearly certain of every token, whatever the period of the loop (MiniMax-M1 2025, section 3.2,
    which ends a generation after 3,000 such tokens).
    """
    bound = math.log(probability)
    runs = groupby(logprobs_L, key=lambda logprob: logprob > bound)
    return max((sum(1 for _ in run) for is_certain, run in runs if is_certain), default=0)


def lowest_mean_logprob(logprobs_L: Sequence[float], window: int) -> float:
    """Return the lowest mean log-probability, under the policy that drew them, of `window` consecutive tokens.

    An answer shorter than the window has one window, itself. Raises ValueError for an empty answer.
    """
    if not logprobs_L:
        raise ValueError("an answer without tokens has no mean log-probability")
    size = min(window, len(logprobs_L))
    sums = [0.0, *accumulate(logprobs_L)]
    return min(sums[end] - sums[end - size] for end in range(size, len(sums))) / size
