"""Rewards that nobody earned: the control experiment. With them the same machinery must not learn anything."""

from __future__ import annotations

import random
from typing import Generic, TypeVar

Session = TypeVar("Session")


class RewardShuffler(Generic[Session]):
    """Hands every earned reward to exactly one session, drawn at random, so mean and number stay as they were.

    A session waits until `depth` later ones are done: the more wait, the less its reward says about what it did.
    """

    def __init__(self, rng: random.Random, depth: int = 64) -> None:
        self._rng = rng
        self._depth = depth
        self._sessions: list[Session] = []
        self._rewards: list[float] = []

    def exchange(self, session: Session, reward: float) -> list[tuple[Session, float]]:
        """Takes a session with its reward; gives what can be posted by now: nothing, or one session."""
        self._sessions.append(session)
        self._rewards.append(reward)
        return [self._draw()] if len(self._sessions) > self._depth else []

    def drain(self) -> list[tuple[Session, float]]:
        """Everything that still waits."""
        return [self._draw() for _ in range(len(self._sessions))]

    def _draw(self) -> tuple[Session, float]:
        return self._sessions.pop(0), self._rewards.pop(self._rng.randrange(len(self._rewards)))
