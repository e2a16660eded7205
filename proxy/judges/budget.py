"""The tokens that a judge may use in a day."""

from __future__ import annotations

from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobPostponed
from proxy.judges.repository import JudgementRepository
from proxy.judges.subjects import Subject

_DAY_SECONDS = 86400.0
# How soon a raised budget takes effect. Each waiting job costs a query and a write in every pause.
_BUDGET_PAUSE_SECONDS = 600.0


async def postpone_over_budget(database: Database, subject: Subject, *, now: float) -> None:
    """Raise JobPostponed if the subject's judge has used the tokens that it may use in a day."""
    budget = subject.judge.tokens_per_day
    if budget is None:
        return
    since = now - _DAY_SECONDS
    used = await database.read(
        lambda connection: JudgementRepository(connection).tokens_since(subject.run_id, subject.name, since)
    )
    if used >= budget:
        reason = f"the judge {subject.name!r} has used {used} tokens in 24 hours, of {budget} (tokens_per_day)"
        raise JobPostponed(reason, seconds=_BUDGET_PAUSE_SECONDS)
