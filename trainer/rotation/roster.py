"""The runs that a trainer trains, and how they change: runs arrive, are refused, and are let go.

Only the first rank has a roster; the other ranks follow its changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from threading import Condition

from structlog.contextvars import bound_contextvars

from trainer.errors import TrainerError
from trainer.proxy_client import ProxyClient
from trainer.rotation.arrivals import Arrival
from trainer.rotation.following import Following

# Seconds before a run that could not be begun is tried again, because its proxy or its teacher fell silent meanwhile.
# They double, because each attempt loads a model and takes the time of other runs.
_FIRST_DELAY = 5.0
_LONGEST_DELAY = 300.0


class Action(StrEnum):
    """What happens to a run: it begins, ends by an error, or is let go because it is not active any more."""

    BEGIN = "begin"
    FAIL = "fail"
    LEAVE = "leave"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    run: str
    action: Action
    error: TrainerError | None = None


class Roster:
    """The runs that wait for their proxies. With `following`, also those that a proxy reports as active.

    Call all methods but `start` and `close` with `changed` locked.
    """

    def __init__(
        self,
        names: Iterable[str],
        connect: Callable[[str], ProxyClient],
        changed: Condition,
        following: Following | None = None,
    ) -> None:
        """`connect` returns a client of the run with a section of that name (`arrivals.Connect`)."""
        self._connect = connect
        self._changed = changed
        self._following = following
        self._names = tuple(names)
        self._arrivals: dict[str, Arrival] = {}
        self._delays: dict[str, float] = {}
        self._given_up: set[str] = set()

    def start(self) -> None:
        with self._changed:
            for name in self._names:
                self._wait_for(name)
        if self._following is not None:
            self._following.start()

    @property
    def is_empty(self) -> bool:
        """Return whether no run can arrive any more."""
        return not self._arrivals and self._following is None

    def next_change(self, trained: Collection[str]) -> Change | None:
        """Return the next change, given the runs that are trained; None if there is none now. Raises ProxyRefused if
        the proxy does not tell its runs."""
        active = None if self._following is None else self._following.active()
        if active is not None:
            gone = [name for name in (*trained, *self._arrivals) if name not in active]
            # A run that failed is tried again after it was paused or archived, and resumed.
            self._given_up &= set(active)
            for name in active:
                if name not in trained and name not in self._arrivals and name not in self._given_up:
                    self._wait_for(name)
            if gone:
                self._forget(gone[0])
                return Change(run=gone[0], action=Action.LEAVE)
        for name, arrival in self._arrivals.items():
            if arrival.has_ended:
                del self._arrivals[name]
                arrival.close()
                action = Action.BEGIN if arrival.error is None else Action.FAIL
                return Change(run=name, action=action, error=arrival.error)
        return None

    def begun(self, name: str) -> None:
        """Record that a run was begun."""
        self._delays.pop(name, None)

    def retry(self, name: str) -> None:
        """Wait for a run's proxy again, after a pause that grows with each call until the run is begun."""
        delay = self._delays.get(name, _FIRST_DELAY)
        self._delays[name] = min(2 * delay, _LONGEST_DELAY)
        self._wait_for(name, delay)

    def give_up(self, name: str) -> None:
        """Record that a run ended by an error."""
        self._given_up.add(name)

    def close(self) -> None:
        if self._following is not None:
            self._following.close()
        for arrival in self._arrivals.values():
            arrival.close()

    def _wait_for(self, name: str, after: float = 0.0) -> None:
        with bound_contextvars(run=name):
            self._arrivals[name] = arrival = Arrival(partial(self._connect, name), self._changed, after)
            arrival.start()

    def _forget(self, name: str) -> None:
        self._delays.pop(name, None)
        if (arrival := self._arrivals.pop(name, None)) is not None:
            arrival.close()
