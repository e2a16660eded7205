"""A few log-probabilities of a version, by which an engine proves that it computes with the version's weights."""

from __future__ import annotations

import math

import structlog
import torch

from proxy.contract.policy import Probe
from trainer.models.passes import Rows
from trainer.models.policy import Policy

# Long enough that other weights cannot give the same numbers by chance, and far below any model's context.
_LENGTH = 16
# A prime, so that the ids are spread over the vocabulary without repetition.
_STRIDE = 7919

_log = structlog.get_logger("trainer.weights")


def probe_of(policy: Policy, device: torch.device) -> Probe | None:
    """Score the probe's ids under the current weights, in float32. A collective: every rank scores the same row.

    Return None, with a warning, if a log-probability is not finite.
    """
    ids = probe_ids(policy.vocabulary)
    ids_T = torch.tensor(ids, device=device)
    predictors = torch.arange(len(ids) - 1, device=device)
    positions_BT = torch.arange(len(ids), device=device)[None]
    temperatures = torch.ones(len(predictors), device=device)
    with policy.in_float32():
        (scores,) = policy.score([Rows(ids_T[None], positions_BT, predictors, ids_T[1:], temperatures)])
    # Rounding may leave the log-probability of a certain token just above 0.
    logprobs = scores.logprobs_N.clamp(max=0.0).tolist()
    if not all(math.isfinite(each) for each in logprobs):
        _log.warning("no probe for this version: its log-probabilities are not finite, so engines are not checked")
        return None
    return Probe(ids=ids, logprobs=tuple(logprobs))


def probe_ids(vocabulary: int) -> tuple[int, ...]:
    """Return the ids of the probe, from the middle half of the vocabulary: special tokens are at its ends, and
    engines may treat them in ways of their own."""
    first, width = vocabulary // 4, max(1, vocabulary // 2)
    return tuple(first + (number * _STRIDE) % width for number in range(_LENGTH))
