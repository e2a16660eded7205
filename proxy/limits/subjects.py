"""Whose limits bind a call: those of its run, of the run's project, and of the key that it is made with. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from proxy.auth.access import Principal
from proxy.runs.service import RunView
from proxy.settings import UsageLimits


class Scope(StrEnum):
    """The kinds of subjects. The values are words of messages and events."""

    RUN = "run"
    PROJECT = "project"
    KEY = "key"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A run, a project or a key, with its limits at one moment."""

    scope: Scope
    id: str
    name: str
    limits: UsageLimits

    def setting(self, limit: str) -> str:
        """Return the place of one of the limits in messages, such as `run.limits.calls_per_minute`."""
        return f"{self.scope.value}.limits.{limit}"

    def metric(self, limit: str) -> str:
        """Return the value of the metrics' label for one of the limits; without a prefix, it is the run's."""
        return limit if self.scope is Scope.RUN else f"{self.scope.value}.{limit}"


def subjects_of(run: RunView, principal: Principal) -> tuple[Subject, ...]:
    """Return those whose limits bind the calls that a key makes to a run; nothing if there are no limits."""
    # The narrowest first: if a key refuses most calls, nothing is taken of what its run and project permit.
    found = []
    key = principal.limiter
    if key is not None and key.limits is not None:
        found.append(Subject(scope=Scope.KEY, id=key.key_id, name=key.name or key.key_id, limits=key.limits))
    if run.project_limits is not None:
        limits = run.project_limits
        found.append(Subject(scope=Scope.PROJECT, id=run.project_id, name=run.project, limits=limits))
    if run.settings.limits.bound_calls:
        found.append(Subject(scope=Scope.RUN, id=run.id, name=run.name, limits=run.settings.limits))
    return tuple(found)
