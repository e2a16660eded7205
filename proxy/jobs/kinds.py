"""The kinds of jobs: their handlers and bounds, and the errors by which a handler ends an attempt."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

_Result = TypeVar("_Result")

Json = dict[str, Any]


class JobFailure(Exception):
    """An attempt failed for a reason that the handler knows; the job is tried again. The message is recorded."""


class JobRefused(JobFailure):
    """The job can never succeed (its subject is gone, its payload is wrong): it is dead at once."""


class JobPostponed(Exception):
    """The job cannot run now (a budget is spent, a service asks for a pause). The attempt does not count."""

    def __init__(self, reason: str, *, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


class LeaseLost(Exception):
    """The job was cancelled, or its lease passed and another worker has it: this attempt can have no effect."""


class RunningJob(Protocol):
    """A leased job, as its handler sees it.

    `id` is the same in every attempt: send it along with effects outside of the database, which happen at least once,
    so that the receiver can recognise a repetition. `attempt` counts from 1. `run_id` is None for a job without run.
    """

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def payload(self) -> Json: ...
    @property
    def run_id(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...

    async def complete(self, work: Callable[[Connection], _Result], *, result: Json | None = None) -> _Result:
        """Run `work` and complete the job in one transaction, so that the effect of `work` happens exactly once.

        `work` follows the rules of `Database.commit`. Raise LeaseLost, with nothing changed, if another worker has
        the job or it was cancelled.
        """
        ...


Handler = Callable[[RunningJob], Awaitable[Json | None]]
"""Does the work of a job. Returns the result to record, which is ignored after `complete`. Any exception fails the
attempt. It runs on the event loop that also answers calls, so computation of more than some milliseconds belongs into
a thread."""


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A kind of job.

    `concurrency` bounds the running jobs of the kind over all processes. An attempt that takes longer than
    `timeout_seconds` is cancelled and fails. After attempt n fails, the next one follows in a random time of up to
    `backoff_seconds` · 2ⁿ⁻¹ (at least half of it), `longest_backoff_seconds` at most; after `attempts` the job is
    dead.
    """

    name: str
    handler: Handler
    concurrency: int = 4
    attempts: int = 8
    timeout_seconds: float = 600.0
    backoff_seconds: float = 2.0
    longest_backoff_seconds: float = 900.0

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64:
            raise ValueError("the name of a kind has 1 to 64 characters")
        if self.concurrency < 1 or self.attempts < 1 or self.timeout_seconds <= 0 or self.backoff_seconds < 0:
            raise ValueError(f"the kind {self.name} needs concurrency, attempts and timeout_seconds above 0")

    def pause_after(self, attempt: int, fraction: float | None = None) -> float:
        """Return the seconds to wait after this failed attempt, counted from 1. `fraction` (0 to 1) replaces chance.

        Jobs that failed together, for example when a service went away, do not all come back at the same moment.
        """
        # The exponent is bounded because 2.0 ** 1100 overflows.
        longest = min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** min(attempt - 1, 60))
        return longest * (0.5 + (random.random() if fraction is None else fraction) / 2)  # noqa: S311


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Enqueues a job of `kind` at every time that is `offset_seconds` after a multiple of `every_seconds`, in UTC.

    `every_seconds=86400, offset_seconds=3 * 3600` is every night at three.
    """

    name: str
    kind: str
    every_seconds: float
    offset_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.every_seconds < 1 or not 0 <= self.offset_seconds < self.every_seconds:
            raise ValueError(f"the schedule {self.name} needs every_seconds ≥ 1 and a smaller offset_seconds ≥ 0")

    def tick(self, now: float) -> float:
        """Return the last tick at or before `now`."""
        return (now - self.offset_seconds) // self.every_seconds * self.every_seconds + self.offset_seconds


class JobKinds:
    """The kinds that this process can run, by name, and their schedules."""

    def __init__(self, kinds: Iterable[JobKind] = (), schedules: Iterable[Schedule] = ()) -> None:
        self._kinds: dict[str, JobKind] = {}
        self.schedules: list[Schedule] = []
        for kind in kinds:
            self.register(kind)
        for schedule in schedules:
            self.add_schedule(schedule)

    def register(self, kind: JobKind) -> None:
        """Add a kind. Raise ValueError if the name is taken."""
        if kind.name in self._kinds:
            raise ValueError(f"there is already a kind of job named {kind.name}")
        self._kinds[kind.name] = kind

    def add_schedule(self, schedule: Schedule) -> None:
        """Add a schedule. Raise ValueError for an unknown kind or a name that is taken."""
        if schedule.kind not in self._kinds:
            raise ValueError(f"the schedule {schedule.name} is of an unknown kind of job, {schedule.kind}")
        if any(known.name == schedule.name for known in self.schedules):
            raise ValueError(f"there is already a schedule named {schedule.name}")
        self.schedules.append(schedule)

    def find(self, name: str) -> JobKind | None:
        return self._kinds.get(name)

    def __getitem__(self, name: str) -> JobKind:
        return self._kinds[name]

    def __iter__(self) -> Iterator[JobKind]:
        return iter(self._kinds.values())
