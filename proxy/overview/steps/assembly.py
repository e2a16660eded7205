"""Builds views of steps and figures of their audits from rows, without I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from proxy.contract.claim import TrajectoryAudit
from proxy.database.rows import AnyRow
from proxy.lifecycle.weights import weights_of
from proxy.overview.steps.views import StepItem


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a step's audit; means and maxima are None if nothing was trained."""

    trajectories: int
    trained_tokens: int
    reward_mean: float | None
    staleness_mean: float | None
    staleness_max: int | None


def audit_of(stored: Sequence[Any]) -> tuple[TrajectoryAudit, ...]:
    """Convert a stored audit."""
    return tuple(
        msgspec.convert(
            {**_NOT_FINITE, **{name: value for name, value in entry.items() if value is not None}}, TrajectoryAudit
        )
        for entry in stored
    )


# JSON has no NaN, so the store has null for numbers that were not finite.
_NOT_FINITE = {field.name: math.nan for field in msgspec.structs.fields(TrajectoryAudit) if field.type is float}


class _Audited(Protocol):
    """The fields of an audit that `step_facts` reads."""

    @property
    def reward(self) -> float: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def staleness_mean(self) -> float: ...
    @property
    def staleness_max(self) -> int: ...


class _AuditFigures(msgspec.Struct, frozen=True):
    """The fields of a stored audit that `step_facts` reads. Hundreds of steps are decoded at once, so other fields
    are skipped."""

    trained_tokens: int
    staleness_max: int
    stored_reward: float | None = msgspec.field(name="reward", default=None)
    stored_staleness: float | None = msgspec.field(name="staleness_mean", default=None)

    @property
    def reward(self) -> float:
        return math.nan if self.stored_reward is None else self.stored_reward

    @property
    def staleness_mean(self) -> float:
        return math.nan if self.stored_staleness is None else self.stored_staleness


_AUDIT_FIGURES = msgspec.json.Decoder(tuple[_AuditFigures, ...])


def stored_step_facts(audit: str) -> StepFacts:
    """Return the figures of a step's audit, given as stored JSON."""
    return step_facts(_AUDIT_FIGURES.decode(audit))


def step_facts(audit: Sequence[_Audited]) -> StepFacts:
    """Return the figures of an audit. Trained tokens weight the staleness; every trajectory counts once in the
    reward."""
    tokens = sum(entry.trained_tokens for entry in audit)
    taught = [entry for entry in audit if entry.trained_tokens > 0]
    weighted = sum(entry.staleness_mean * entry.trained_tokens for entry in taught)
    return StepFacts(
        trajectories=len(audit),
        trained_tokens=tokens,
        reward_mean=sum(entry.reward for entry in audit) / len(audit) if audit else None,
        staleness_mean=weighted / tokens if tokens else None,
        staleness_max=max((entry.staleness_max for entry in taught), default=None),
    )


def step_item(row: AnyRow, facts: StepFacts) -> StepItem:
    return StepItem(
        version=row.version,
        parent_version=row.parent_version,
        state=row.state,
        created_at=row.created_at,
        served_at=row.served_at,
        swap_seconds=row.swap_seconds,
        weights=weights_of(row, with_files=False),
        trajectories=facts.trajectories,
        trained_tokens=facts.trained_tokens,
        reward_mean=facts.reward_mean,
        staleness_mean=facts.staleness_mean,
        staleness_max=facts.staleness_max,
        metrics=row.metrics,
        weights_removed_at=row.weights_removed_at,
        rejected_because=row.rejected_because,
    )
