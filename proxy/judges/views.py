"""Judges of a run, as the API shows them."""

from __future__ import annotations

import msgspec


class JudgeView(msgspec.Struct, frozen=True, kw_only=True):
    """A judge and the attempts it has made, in all of its forms. `model` is the address of a verifier, or the
    function of a judge in Python. `cost` is None if no attempt had a price. `spread` is the mean of the votes'
    spreads. `abstained` attempts said that they cannot tell. `compared` counts pairs of answers for versions' gates.
    `fingerprint` is None if the judge's prompt cannot be read.
    `problem` is why the newest attempt failed; None if it did not. `drift` is how its newest scores differ from those
    before; None if they do not."""

    name: str
    kind: str
    model: str | None
    reward: str
    votes: int
    fingerprint: str | None
    scored: int = 0
    failed: int = 0
    abstained: int = 0
    compared: int = 0
    mean_score: float | None = None
    spread: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    problem: str | None = None
    drift: str | None = None


class TrialScore(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge says about a session or a turn. Without a `score`, `rationale` is why there is none."""

    session_id: str
    turn_id: str | None
    reward: str
    score: float | None
    spread: float | None
    votes: list[float]
    rationale: str | None
    is_cut: bool


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of a trial. `problems` are of sessions without any, each beginning with the session's id."""

    scores: list[TrialScore]
    problems: list[str]
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class Rejudging(msgspec.Struct, frozen=True, kw_only=True):
    """`enqueued` sessions will be judged. `more`: there may be others; ask again once these are judged."""

    enqueued: int
    more: bool
