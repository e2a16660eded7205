"""Rewards that were not earned, for the control experiment: with them the same machinery must not learn anything."""

from __future__ import annotations

import random
from typing import Generic, TypeVar

Session = TypeVar("Session")


class RewardShuffler(Generic[Session]):
    """Gives every earned reward to exactly one randomly drawn session, so that mean and number do not change.

    A session waits until `depth` later ones are done: the larger it is, the less a reward depends on its own session.
    """

    def __init__(self, rng: random.Random, depth: int = 64) -> None:
        self._rng = rng
        self._depth = depth
        self._sessions: list[Session] = []
        self._rewards: list[float] = []

    def exchange(self, session: Session, reward: float) -> list[tuple[Session, float]]:
        """Take a session with its reward, and return what can be posted now: nothing, or one session."""
        self._sessions.append(session)
        self._rewards.append(reward)
        return [self._draw()] if len(self._sessions) > self._depth else []

    def drain(self) -> list[tuple[Session, float]]:
        """Return all sessions that still wait."""
        return [self._draw() for _ in range(len(self._sessions))]

    def _draw(self) -> tuple[Session, float]:
        return self._sessions.pop(0), self._rewards.pop(self._rng.randrange(len(self._rewards)))
