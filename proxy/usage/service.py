"""Read the limits of runs, projects and keys, and what is used of their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.auth.access import Principal, Right, covers, has_right, is_scoped
from proxy.auth.service import Credentials
from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.limits.budget import Budget, Period, Spent, window
from proxy.limits.repository import LimitRepository
from proxy.limits.subject_share import budgets_of
from proxy.limits.subjects import Scope, Subject
from proxy.projects.service import ProjectDirectory
from proxy.runs.service import RunDirectory
from proxy.settings import UsageLimits


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of tokens and its use, up to about a second late. It is full again at `resets_at`."""

    period: Period
    tokens: int
    used: int
    left: int
    resets_at: float
    is_exhausted: bool


class LimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a run, a project or a key, and the use of its budgets."""

    scope: Scope
    id: str
    name: str
    limits: dict[str, Any]
    budgets: tuple[BudgetUse, ...]


class UsageService:
    """Reads limits in the scope of a key."""

    def __init__(
        self,
        database: Database,
        runs: RunDirectory,
        projects: ProjectDirectory,
        credentials: Credentials,
        clock: Clock,
    ) -> None:
        self._database = database
        self._runs = runs
        self._projects = projects
        self._credentials = credentials
        self._clock = clock

    async def visible(self, who: Principal) -> list[LimitsView]:
        """Return the limits that the key may see: those of projects, then of runs, then of keys.

        Keys are listed for those who manage them; every other key sees its own limits only.
        """
        return await self.used([*await self._of_projects(who), *await self._of_runs(who), *await self._of_keys(who)])

    async def binding(self, who: Principal, *, run_id: str, project: str) -> list[LimitsView]:
        """Return the limits of a run and of its project, as far as the key may see them."""
        owners = {(Scope.RUN, run_id), (Scope.PROJECT, project)}
        seen = await self.visible(who)
        return [one for one in seen if (one.scope, one.id if one.scope is Scope.RUN else one.name) in owners]

    async def used(self, subjects: Sequence[Subject]) -> list[LimitsView]:
        """Return the subjects' limits with what is used of them."""
        ids = [subject.id for subject in subjects if budgets_of(subject.limits)]
        spent: dict[str, dict[Period, Spent]] = {}
        if ids:
            spent = await self._database.read(lambda connection: LimitRepository(connection).budgets(ids))
        now = self._clock()
        return [_view(subject, spent.get(subject.id, {}), now) for subject in subjects]

    async def _of_projects(self, who: Principal) -> list[Subject]:
        if not has_right(who, Right.SEE_PROJECT):
            return []
        found = await self._projects.list_()
        return [
            _subject(Scope.PROJECT, project.id, project.name, project.limits)
            for project in found
            if project.limits is not None and who.project_id in (None, project.id)
        ]

    async def _of_runs(self, who: Principal) -> list[Subject]:
        return [
            Subject(scope=Scope.RUN, id=run.id, name=run.name, limits=run.settings.limits)
            for run in await self._runs.list_()
            if run.settings.limits.bound_calls and covers(who, run)
        ]

    async def _of_keys(self, who: Principal) -> list[Subject]:
        if not has_right(who, Right.CHANGE):
            limiter = who.limiter
            if limiter is None or limiter.limits is None:
                return []
            name = limiter.name or limiter.key_id
            return [Subject(scope=Scope.KEY, id=limiter.key_id, name=name, limits=limiter.limits)]
        keys = await self._credentials.limited(project_id=who.project_id if is_scoped(who) else None)
        # Keys that replace each other by rotation are counted as one, which has the name of the newest.
        newest = {key.limited_as: key for key in keys}
        return [_subject(Scope.KEY, counted_as, key.name or key.id, key.limits) for counted_as, key in newest.items()]


def _subject(scope: Scope, id_: str, name: str, limits: dict[str, Any] | None) -> Subject:
    return Subject(scope=scope, id=id_, name=name, limits=UsageLimits.model_validate(limits or {}))


def _view(subject: Subject, spent: dict[Period, Spent], now: float) -> LimitsView:
    return LimitsView(
        scope=subject.scope,
        id=subject.id,
        name=subject.name,
        limits=subject.limits.model_dump(include=set(UsageLimits.model_fields), exclude_none=True),
        budgets=tuple(_use(budget, spent.get(budget.period, Spent()), now) for budget in budgets_of(subject.limits)),
    )


def _use(budget: Budget, spent: Spent, now: float) -> BudgetUse:
    used = spent.at(budget.period, now).tokens
    return BudgetUse(
        period=budget.period,
        tokens=budget.tokens,
        used=used,
        left=max(0, budget.tokens - used),
        resets_at=window(budget.period, now)[1],
        is_exhausted=used >= budget.tokens,
    )
