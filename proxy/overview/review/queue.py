"""Which sessions people should look at, and why. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ENOUGH = 20
"""Number of sessions from which on a log-probability can be low among them."""

_UNUSUAL = 2.0
"""Standard deviations below the mean at which a log-probability is low."""


class Observed(NamedTuple):
    """A session that has ended, newest first among others.

    `judge` is the judge with the largest `spread` between its votes, in the unit of its scores, and None without
    votes that differ. `mean_logprob` is the mean over all tokens of answers, in nats; None without tokens.
    """

    id: str
    task: str | None
    reward: float | None
    ended_at: float
    judge: str | None
    spread: float
    mean_logprob: float | None


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """A session worth a look, with the reasons as phrases."""

    id: str
    task: str | None
    reward: float | None
    ended_at: float
    reasons: tuple[str, ...]


def queue_of(sessions: Sequence[Observed], limit: int) -> list[Queued]:
    """Return up to `limit` sessions for which there is a reason, those with most reasons first, newer ones before
    older ones."""
    logprobs = [session.mean_logprob for session in sessions if session.mean_logprob is not None]
    low = _low(logprobs)
    found = [(session, _reasons(session, low)) for session in sessions]
    queued = [
        Queued(
            id=session.id, task=session.task, reward=session.reward, ended_at=session.ended_at, reasons=tuple(reasons)
        )
        for session, reasons in found
        if reasons
    ]
    return sorted(queued, key=lambda each: (-len(each.reasons), -each.ended_at))[:limit]


def _reasons(session: Observed, low: float | None) -> list[str]:
    reasons = []
    if session.judge is not None:
        reasons.append(f"votes of judge {session.judge} differ by {session.spread:g}")
    if session.reward is not None and session.reward < 0:
        reasons.append("negative reward")
    if low is not None and session.mean_logprob is not None and session.mean_logprob < low:
        reasons.append(f"unusually low log-probability, {session.mean_logprob:.2f} per token")
    return reasons


def _low(logprobs: Sequence[float]) -> float | None:
    """Return the bound below which a log-probability is low; None if there are too few, or if they hardly differ."""
    if len(logprobs) < ENOUGH:
        return None
    mean = math.fsum(logprobs) / len(logprobs)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in logprobs) / len(logprobs))
    return mean - _UNUSUAL * deviation if deviation > 1e-6 else None
