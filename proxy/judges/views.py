"""Judges of a run, as the API shows them."""

from __future__ import annotations

import msgspec


class JudgeView(msgspec.Struct, frozen=True, kw_only=True):
    """A judge and the attempts it has made, in all of its forms. `cost` is None if no attempt had a price. `spread`
    is the mean of the votes' spreads. `problem` is why the newest attempt failed; None if it gave a score."""

    name: str
    kind: str
    model: str
    reward: str
    votes: int
    fingerprint: str
    scored: int = 0
    failed: int = 0
    mean_score: float | None = None
    spread: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    problem: str | None = None


class Rejudging(msgspec.Struct, frozen=True, kw_only=True):
    """`enqueued` sessions will be judged. `more`: there may be others; ask again once these are judged."""

    enqueued: int
    more: bool
