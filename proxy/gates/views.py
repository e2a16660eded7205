"""Findings of gates, results of evaluations and holds, as the API answers them."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.policy import VersionState


class FindingView(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate has found: `state` is waiting, passed or failed. `evidence` has its numbers."""

    gate: str
    state: str
    text: str
    evidence: dict[str, Any]
    updated_at: float


class VersionFindings(msgspec.Struct, frozen=True, kw_only=True):
    """A version with what its gates, or the watch over the serving version, have found about it. `reason` is why it
    was rejected or rolled back."""

    version: int
    parent: int | None
    state: VersionState
    created_at: float
    shadow_at: float | None
    canary_at: float | None
    reason: str | None
    findings: tuple[FindingView, ...]


class HoldView(msgspec.Struct, frozen=True, kw_only=True):
    """New sessions that a version answers while others move on: those of a key, or a share of all."""

    id: str
    version: int
    key_id: str | None
    share: float | None
    reason: str
    created_at: float


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one attempt at a task."""

    task: str
    attempt: int
    reward: float
    session_id: str | None


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a version at a suite."""

    version: int
    suite: str
    results: tuple[EvaluationResult, ...]
