"""A sink may fail, be slow or hang: training does not wait for it, and the steps that it missed are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.observe.metrics.background import BackgroundSink
from trainer.observe.metrics.sink import RunAbout, StepMetrics
from trainer.observe.metrics.sinks import Sinks

RUN = RunAbout(id="run_1", name="policy", next_version=1, config={})
SOON = 30.0


class Recorder:
    """A sink that fails and waits on request."""

    def __init__(self, fails: Callable[[str], bool] = lambda _what: False) -> None:
        self.seen: list[str] = []
        self.fails = fails
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_in = threading.Semaphore(0)

    def _hear(self, what: str) -> None:
        self.is_in.release()
        assert self.may_go_on.wait(SOON)
        self.seen.append(what)
        if self.fails(what):
            raise OSError(what)

    def open(self, run: RunAbout) -> None:
        self._hear("open")

    def write(self, step: StepMetrics) -> None:
        self._hear(str(step.version))

    def close(self) -> None:
        self._hear("close")


@pytest.fixture
def hung() -> Iterator[Recorder]:
    recorder = Recorder()
    recorder.may_go_on.clear()
    yield recorder
    recorder.may_go_on.set()


def step(version: int) -> StepMetrics:
    return StepMetrics(version, 0.0, {"loss": 1.0})


def ended(sink: BackgroundSink) -> bool:
    sink.finish()
    return sink.join(time.monotonic() + SOON)


def test_everything_is_written_in_order_before_the_end() -> None:
    recorder = Recorder()
    sink = BackgroundSink("sink", recorder, RUN)
    for version in range(1, 20):
        sink.put(step(version))
    assert ended(sink)
    assert recorder.seen == ["open", *map(str, range(1, 20)), "close"]
    assert (sink.written, sink.failed, sink.dropped) == (19, 0, 0)


@given(bad=st.sets(st.integers(1, 8)), opens_at=st.integers(1, 9))
def test_a_failure_loses_only_its_own_step(bad: set[int], opens_at: int) -> None:
    """The sink opens at the `opens_at`-th attempt; the first attempt is before any step."""
    attempts = iter(range(1, 99))
    recorder = Recorder(lambda what: next(attempts) < opens_at if what == "open" else what in map(str, bad))
    sink = BackgroundSink("sink", recorder, RUN)
    for version in range(1, 9):
        sink.put(step(version))
    assert ended(sink)
    unopened = set(range(1, opens_at - 1))
    written = [version for version in range(1, 9) if version not in unopened]
    assert [what for what in recorder.seen if what.isdecimal()] == [str(version) for version in written]
    assert sink.failed == len(unopened | (bad - unopened))
    assert sink.written == 8 - sink.failed
    assert recorder.seen.count("open") == min(opens_at, 9)


def test_a_sink_that_hangs_does_not_delay_its_caller(hung: Recorder) -> None:
    sink = BackgroundSink("sink", hung, RUN, capacity=3)
    hung.is_in.acquire()  # it is in `open`, and stays there
    for version in range(1, 11):
        sink.put(step(version))
    assert sink.dropped == 7
    sink.finish()
    assert not sink.join(time.monotonic())
    hung.may_go_on.set()
    assert sink.join(time.monotonic() + SOON)
    assert hung.seen == ["open", "1", "2", "3", "close"]


def test_a_sink_that_hangs_does_not_affect_another(hung: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.observe.metrics.sinks.CLOSE_SECONDS", 0.5)
    well = Recorder()
    sinks = Sinks({"hangs": hung, "well": well}, RUN)
    for version in (1, 2):
        sinks.put(version, {"loss": 1.0})
    for _ in range(3):
        well.is_in.acquire()
    sinks.close()
    assert well.seen[:3] == ["open", "1", "2"]
    assert hung.seen == []
