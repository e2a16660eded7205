"""Enforce limits: a call asks before it begins and pays for its tokens after it has ended.

A call is bound by the limits of its run, of the run's project, and of its key. Each proxy takes calls from the store
for up to a second in advance and pays for the tokens of several calls together, so most calls do not wait for the
store. A call without limits costs nothing. See `docs/decisions/0024-rate-limits.md` and
`docs/decisions/0105-limits-of-projects-and-keys.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from proxy.auth.access import Principal
from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.errors import BudgetExhausted, RateLimited, StoreUnavailable, TokensLimited, TrainerBehind
from proxy.lifecycle.signals import Signals
from proxy.limits.budget import Period
from proxy.limits.repository import LimitRepository
from proxy.limits.share import Kind, Refusal, Standing
from proxy.limits.subject_share import SubjectShare
from proxy.limits.subjects import Scope, Subject, subjects_of
from proxy.runs.service import RunView

# How long a count of waiting trajectories is reused.
_COUNT_SECONDS = 1.0

# Retry-After of a refused session. A trainer takes its trajectories in batches, so room comes in steps.
_RETRY_OPENING_SECONDS = 5

_SETTINGS = {
    Kind.CALLS: "calls_per_minute",
    Kind.TOKENS: "tokens_per_minute",
    Period.DAY: "tokens_per_day",
    Period.MONTH: "tokens_per_month",
}


class LimitObserver(Protocol):
    """Receiver of every refused call, for the metrics. It must not raise and not wait."""

    def call_limited(self, *, limit: str, run: str) -> None:
        """`limit` is the setting's name, after `project.` or `key.` for limits of these."""
        ...


class Admission:
    """The admission of one call by the limits that bind it. It counts once, however often the methods are called."""

    def __init__(self, limits: Limits, run: RunView, subjects: Sequence[Subject]) -> None:
        self._limits = limits
        self._run = run
        self._subjects = subjects
        self._is_granted = False

    def again(self) -> Admission:
        """Return the admission of another generation that the same limits bind."""
        return Admission(self._limits, self._run, self._subjects)

    async def to_open(self) -> None:
        """Admit a call that opens a session. Raise RateLimited if a limit is reached."""
        if not self._is_granted:
            await self._limits.check_waiting(self._run)
        await self.to_begin()

    async def to_begin(self) -> None:
        """Admit a call of a known session. Raise RateLimited if a limit is reached."""
        if not self._is_granted:
            await self._limits.begin_call(self._run, self._subjects)
            self._is_granted = True

    def used(self, tokens: int) -> None:
        """Record that the call has ended, with so many tokens in prompt and answer together."""
        self._limits.used(self._run, self._subjects, tokens)

    def standings(self) -> tuple[Standing, ...]:
        """Return the rate of calls and the rate of tokens of which least is left, as far as this proxy knows them."""
        return self._limits.standings(self._subjects)


class Limits:
    """The limits of runs, projects and keys, in this process."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        observer: LimitObserver | None = None,
        signals: Signals | None = None,
    ) -> None:
        """`signals` are told of events that the limits append to the log."""
        self._database = database
        self._clock = clock
        self._observer = observer
        self._signals = signals
        self._shares: dict[str, SubjectShare] = {}
        self._ready_counts: dict[RunId, tuple[float, int, bool]] = {}  # (time, bound, whether there are more)

    def admission(self, run: RunView, principal: Principal) -> Admission | None:
        """Return the admission that a call of the run with a key needs; None if no limit binds it."""
        subjects = subjects_of(run, principal)
        if not subjects and run.settings.limits.max_waiting is None:
            return None
        return Admission(self, run, subjects)

    async def check_waiting(self, run: RunView) -> None:
        """Raise TrainerBehind if too many trajectories wait, so that no session may be opened for training now."""
        bound = run.settings.limits.max_waiting
        if bound is None or not await self._has_more_ready(run.id, bound):
            return
        self._report_refusal("max_waiting", run)
        raise TrainerBehind(
            f"more than {bound} trajectories of the run {run.name!r} wait for its trainer (run.limits.max_waiting): "
            f"open sessions continue, and new ones are opened once it has caught up; try again in "
            f"{_RETRY_OPENING_SECONDS} seconds, and check that the trainer is running",
            retry_after=_RETRY_OPENING_SECONDS,
        )

    async def begin_call(self, run: RunView, subjects: Sequence[Subject]) -> None:
        """Begin a call that every subject permits. Raise RateLimited if it must wait, StoreUnavailable if the store
        cannot be asked."""
        shares = [self._share_of(subject) for subject in subjects]
        # Known refusals first: calls that are refused anyway must not use up what other subjects permit.
        for share in shares:
            self._raise_refusal(run, share.subject, share.refusal())
        begun: list[SubjectShare] = []
        try:
            for share in shares:
                self._raise_refusal(run, share.subject, await share.begin_call())
                begun.append(share)
        except BaseException:  # also a cancellation: the call does not begin
            for share in begun:
                share.return_call()
            raise

    def used(self, run: RunView, subjects: Collection[Subject], tokens: int) -> None:
        """Record that a call has ended whose prompt and answer have so many tokens together."""
        for subject in subjects if tokens else ():
            if subject.limits.bound_tokens:
                self._share_of(subject).used(tokens, run.id)

    async def pay(self) -> None:
        """Write the used tokens to the store. Raise StoreUnavailable; the tokens stay owed then."""
        for share in list(self._shares.values()):
            await share.pay()

    def standings(self, subjects: Collection[Subject]) -> tuple[Standing, ...]:
        """Return for each kind of rate the one of which least is left."""
        least: dict[Kind, Standing] = {}
        for subject in subjects:
            for standing in self._share_of(subject).standings():
                known = least.get(standing.kind)
                if known is None or standing.left < known.left:
                    least[standing.kind] = standing
        return tuple(least[kind] for kind in Kind if kind in least)

    async def aclose(self) -> None:
        """Stop the payments that wait for their delay, and pay at once."""
        for share in self._shares.values():
            await share.stop_paying()
        with suppress(StoreUnavailable):
            await self.pay()

    async def _has_more_ready(self, run_id: RunId, bound: int) -> bool:
        now = self._clock()
        counted = self._ready_counts.get(run_id)
        if counted is None or counted[1] != bound or not counted[0] <= now < counted[0] + _COUNT_SECONDS:
            more = await self._database.read(
                lambda connection: LimitRepository(connection).has_more_ready(run_id, bound)
            )
            self._ready_counts[run_id] = counted = (now, bound, more)
        return counted[2]

    def _share_of(self, subject: Subject) -> SubjectShare:
        share = self._shares.get(subject.id)
        if share is None:
            share = SubjectShare(subject, self._database, self._clock, self._event_appended)
            self._shares[subject.id] = share
        else:
            share.follow(subject)
        return share

    def _event_appended(self) -> None:
        if self._signals is not None:
            self._signals.events.notify()

    def _raise_refusal(self, run: RunView, subject: Subject, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        self._report_refusal(subject.metric(_SETTINGS[refusal.kind]), run)
        raise _refused(subject, refusal, self._clock())

    def _report_refusal(self, limit: str, run: RunView) -> None:
        if self._observer is not None:
            self._observer.call_limited(limit=limit, run=run.name)


def _refused(subject: Subject, refusal: Refusal, now: float) -> RateLimited:
    """Return the error that names the limit, whose it is, and when to try again."""
    seconds = max(1, math.ceil(refusal.seconds))
    setting = _SETTINGS[refusal.kind]
    limit = getattr(subject.limits, setting)
    who, where = f"the {subject.scope.value} {subject.name!r}", subject.setting(setting)
    if isinstance(refusal.kind, Period):
        until = datetime.fromtimestamp(now + refusal.seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return BudgetExhausted(
            f"{who} has used its budget of {limit} tokens a {refusal.kind.value} ({where}): calls begin again at"
            f" {until}, or once the budget is raised",
            retry_after=seconds,
        )
    shared = "for all its agents and proxies together" if subject.scope is Scope.RUN else "for all proxies together"
    if refusal.kind is Kind.CALLS:
        return RateLimited(
            f"{who} accepts {limit} calls a minute ({where}), {shared}; try again in {seconds} seconds",
            retry_after=seconds,
        )
    return TokensLimited(
        f"{who} accepts {limit} tokens a minute in prompts and answers ({where}), {shared}; try again in {seconds}"
        " seconds",
        retry_after=seconds,
    )
