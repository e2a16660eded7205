"""Weighted fair queueing over several slots, checked by simulation."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.fair_queue import FairQueue, FairShare

WEIGHTS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0))
RUNS = st.lists(WEIGHTS, min_size=2, max_size=5)
COSTS = st.lists(st.integers(1, 8), min_size=5, max_size=5)


@dataclass
class Server:
    """An engine with `slots`, in simulated time. Run `n` has the weight `weights[n]`."""

    slots: int
    weights: list[float]
    queue: FairQueue[int] = field(default_factory=FairQueue)
    now: float = 0.0
    served: list[tuple[int, int]] = field(default_factory=list)
    """Run and number of each call, in the order in which they got slots."""
    used: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Slot time by run, of calls that have ended."""
    running: list[tuple[float, int, int, float, float]] = field(default_factory=list)
    cost_of: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Run and cost by call."""

    def share(self, run: int) -> FairShare:
        return FairShare(f"run-{run}", self.weights[run])

    def arrive(self, run: int, cost: float) -> int:
        """Let a call come, which gets a slot at once if one is free and nobody waits."""
        call = len(self.cost_of)
        self.cost_of[call] = (run, cost)
        if len(self.running) < self.slots and not self.queue:
            self._begin(call, self.queue.start(self.share(run)))
        else:
            self.queue.push(self.share(run), call)
        return call

    def end_one(self) -> int:
        """End the running call that is due first, and give its slot away; return the run of that call."""
        ended, _, run, cost, charge = heapq.heappop(self.running)
        self.now = ended
        self.queue.end(self.share(run), charge, cost)
        self.used[run] += cost
        if self.queue:
            waiting, share, charge = self.queue.pop()
            assert share == self.share(self.cost_of[waiting][0])
            self._begin(waiting, charge)
        return run

    def _begin(self, call: int, charge: float) -> None:
        run, cost = self.cost_of[call]
        self.served.append((run, call))
        heapq.heappush(self.running, (self.now + cost, call, run, cost, charge))


def backlogged(slots: int, weights: list[float], costs: list[int], calls: int) -> Server:
    """Return a server on which every run had a call waiting all the time, after `calls` calls have ended."""
    server = Server(slots, weights)
    for run in range(len(weights)):
        for _ in range(slots + 2):
            server.arrive(run, costs[run])
    for _ in range(calls):
        run = server.end_one()
        server.arrive(run, costs[run])
    return server


@given(slots=st.integers(1, 6), weights=RUNS, costs=COSTS)
def test_runs_that_always_wait_get_slot_time_by_their_weights(
    slots: int, weights: list[float], costs: list[int]
) -> None:
    server = backlogged(slots, weights, costs, calls=400)
    shares = [server.used[run] / weight for run, weight in enumerate(weights)]
    # At any moment a run may be ahead by the calls that have slots, whose costs are not known yet.
    most = (slots + 2) * max(costs) / min(weights)
    assert max(shares) - min(shares) <= 2 * most


@given(slots=st.integers(1, 6), weights=RUNS, others=st.integers(1, 30), ended=st.integers(0, 20))
def test_a_run_with_little_work_is_overtaken_by_at_most_one_call_of_each_other_run(
    slots: int, weights: list[float], others: int, ended: int
) -> None:
    server = Server(slots, weights)
    for run in range(1, len(weights)):
        for _ in range(others):
            server.arrive(run, 1.0)
    for _ in range(min(ended, len(server.running))):
        server.end_one()
    began = len(server.served)
    own = server.arrive(0, 1.0)
    while server.running and (0, own) not in server.served:
        server.end_one()
    overtaking = Counter(run for run, call in server.served[began:] if call != own)
    assert all(count == 1 for count in overtaking.values())


@given(
    slots=st.integers(1, 4),
    weights=RUNS,
    events=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)) | st.none(), max_size=60),
)
def test_no_slot_is_free_while_a_call_waits_and_a_run_keeps_its_order(
    slots: int, weights: list[float], events: list[tuple[int, int] | None]
) -> None:
    server = Server(slots, weights)
    for event in events:
        if event is not None:
            server.arrive(event[0] % len(weights), event[1])
        elif server.running:
            server.end_one()
        assert not server.queue or len(server.running) == slots
    while server.running:
        server.end_one()
    assert len(server.served) == len(server.cost_of), "every call is served"
    for _, calls in itertools.groupby(sorted(server.served, key=lambda each: each[0]), key=lambda each: each[0]):
        numbers = [call for _, call in calls]
        assert numbers == sorted(numbers)


@given(
    pushes=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40),
    weights=st.lists(WEIGHTS, min_size=4, max_size=4),
)
def test_a_call_that_leaves_the_queue_leaves_nothing_behind(
    pushes: list[tuple[int, bool]], weights: list[float]
) -> None:
    with_leavers, without = FairQueue[int](), FairQueue[int]()
    shares = [FairShare(f"run-{run}", weight) for run, weight in enumerate(weights)]
    for queue in (with_leavers, without):
        for share in shares:  # different tags to begin with
            queue.end(share, queue.start(share), share.weight)
    for number, (run, leaves) in enumerate(pushes):
        with_leavers.push(shares[run], number)
        if leaves:
            with_leavers.remove(shares[run], number)
        else:
            without.push(shares[run], number)
    while without:
        assert with_leavers.pop() == without.pop()
    assert not with_leavers
    with pytest.raises(KeyError):
        with_leavers.pop()


def test_a_slot_that_was_never_used_is_not_charged() -> None:
    queue = FairQueue[str]()
    one, other = FairShare("one"), FairShare("other")
    for name in ("first", "second"):
        queue.push(one, name)
    queue.push(other, "third")
    item, share, charge = queue.pop()
    assert item == "first"
    queue.end(share, charge, None)  # its client has gone in the same moment
    queue.push(one, "fourth")
    order = [queue.pop()[0] for _ in range(3)]
    assert order.index("second") < 2, "the run is not behind for a call that never ran"


def test_a_run_neither_saves_shares_nor_has_debts_from_a_time_without_calls() -> None:
    queue = FairQueue[int]()
    busy, late = FairShare("busy"), FairShare("late")
    for _ in range(1000):
        queue.end(busy, queue.start(busy), 1.0)
    for number in range(20):
        queue.push(busy, number)
        queue.push(late, 100 + number)
    first = [queue.pop()[1].run_id for _ in range(20)]
    assert 8 <= first.count("late") <= 12


def test_runs_that_came_once_are_forgotten() -> None:
    queue = FairQueue[int]()
    for number in range(5000):
        share = FairShare(f"run-{number}")
        queue.end(share, queue.start(share), 0.0)
    assert queue.flows < 2000
