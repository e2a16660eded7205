"""Weighted fair queueing: which of several runs' waiting calls gets the next free slot of an engine.

Start-time fair queueing with several slots (SFQ(D): Jin, Chase and Kaur, "Interposed proportional sharing for a
storage service utility", SIGMETRICS 2004). Each run has a tag: its use of slots so far, divided by its weight. A free
slot goes to the waiting run with the smallest tag. A run that comes back after a time without waiting calls starts at
the tag that is served now, so that it has neither debts nor savings from that time.

A call's cost is the time for which it holds its slot, which is known only at its end. Until then it is charged the
mean of the latest calls; its end corrects the charge.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

Item = TypeVar("Item")

# Weight of the latest cost in the mean: calls of the last few dozen count.
_LATEST = 0.05
# Charge before any call has ended; in seconds, as costs are. Only its order of magnitude matters.
_FIRST_CHARGE = 1.0
# Runs above which those that wait for nothing are forgotten. An entry is a few hundred bytes.
_MOST_IDLE = 1024


class FairShare(msgspec.Struct, frozen=True):
    """A run and its weight: a run of weight 2 gets twice the slots of a run of weight 1 while both have calls
    waiting."""

    run_id: str
    weight: float = 1.0


class _Flow(Generic[Item]):
    """The state of one run."""

    __slots__ = ("tag", "waiting")

    def __init__(self) -> None:
        self.tag = 0.0
        # Ordered by arrival. Calls leave from the middle as well, when their clients disconnect.
        self.waiting: OrderedDict[Item, FairShare] = OrderedDict()


class FairQueue(Generic[Item]):
    """The waiting calls (`Item`, hashable) of all runs, in no thread but one.

    `start` and `pop` return the charge of the call that gets a slot; the caller passes it to `end`.
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[Item]] = {}
        self._waiting: dict[str, _Flow[Item]] = {}
        """The flows with waiting calls. Those that began to wait first come first, which decides between equal
        tags."""
        self._virtual_time = 0.0
        """The tag of the call that got a slot last; it never decreases."""
        self._charge = _FIRST_CHARGE

    def __bool__(self) -> bool:
        """Whether any call waits."""
        return bool(self._waiting)

    @property
    def flows(self) -> int:
        """The number of runs in memory."""
        return len(self._flows)

    def start(self, share: FairShare) -> float:
        """Charge a call that gets a slot without waiting."""
        return self._serve(self._active(share.run_id), share)

    def push(self, share: FairShare, item: Item) -> None:
        """Let a call wait."""
        flow = self._waiting.get(share.run_id)
        if flow is None:
            flow = self._waiting[share.run_id] = self._active(share.run_id)
        flow.waiting[item] = share

    def pop(self) -> tuple[Item, FairShare, float]:
        """Remove the call that gets the next slot; return it with its share and charge. Raise KeyError if none
        waits."""
        if not self._waiting:
            raise KeyError("no call waits")
        # A scan, and no heap: the end of a call changes its run's tag. There are as many entries as runs that wait.
        run_id = min(self._waiting, key=lambda each: self._waiting[each].tag)
        flow = self._waiting[run_id]
        item, share = flow.waiting.popitem(last=False)
        # Behind the other runs, so that those with an equal tag have turns.
        del self._waiting[run_id]
        if flow.waiting:
            self._waiting[run_id] = flow
        return item, share, self._serve(flow, share)

    def remove(self, share: FairShare, item: Item) -> None:
        """Remove a waiting call whose client has gone; do nothing if it does not wait."""
        flow = self._waiting.get(share.run_id)
        if flow is None:
            return
        flow.waiting.pop(item, None)
        if not flow.waiting:
            del self._waiting[share.run_id]

    def end(self, share: FairShare, charge: float, cost: float | None) -> None:
        """Correct the charge of a call that gave its slot back after `cost` seconds; None: it never began."""
        flow = self._flows.get(share.run_id)
        if flow is not None:
            flow.tag += ((cost or 0.0) - charge) / share.weight
        if cost is not None:
            self._charge += _LATEST * (cost - self._charge)

    def _serve(self, flow: _Flow[Item], share: FairShare) -> float:
        self._virtual_time = max(self._virtual_time, flow.tag)
        flow.tag += self._charge / share.weight
        return self._charge

    def _active(self, run_id: str) -> _Flow[Item]:
        """Return the flow of a run that had no waiting call, with its tag moved to the present."""
        flow = self._flows.get(run_id)
        if flow is None:
            if len(self._flows) >= _MOST_IDLE:
                self._forget_idle()
            flow = self._flows[run_id] = _Flow()
        flow.tag = max(flow.tag, self._virtual_time)
        return flow

    def _forget_idle(self) -> None:
        """Forget the runs that would start at the present if they came back."""
        self._flows = {
            run_id: flow for run_id, flow in self._flows.items() if flow.waiting or flow.tag > self._virtual_time
        }
