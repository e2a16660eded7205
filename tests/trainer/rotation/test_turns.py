"""Several runs in one process, over fake proxies: the same weights as alone, the order of turns, and faults of one
run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
import torch
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import KEY, RUN, TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.observe.documented import documented_metrics
from tests.trainer.observe.test_instruments import PHASES, ranges
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import ALONE, InProcess, build, settings
from trainer.assembly import RunTrainer, Shared
from trainer.claims import leases
from trainer.errors import ProxyRefused, TrainerError, WeightsUnusable
from trainer.models.adapters import AdaptedPolicy
from trainer.proxy_client import ProxyClient
from trainer.rotation import turns
from trainer.rotation.roster import Roster
from trainer.rotation.turns import Turns


def moment(_seconds: float) -> None:
    """Let other threads work instead of pausing."""
    time.sleep(0.001)


class Enough(BaseException):
    """Raised when the test has seen enough."""


class Together:
    """Runs by name, each with its own proxy."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.shared = Shared(torch.device("cpu"), self.changed)
        self.failed: dict[str, TrainerError] = {}
        self.runs: dict[str, InProcess] = {}
        self.proxies: dict[str, TrainingProxy] = {}
        self.made: list[str] = []

    def add(self, name: str, proxy: TrainingProxy, directory: Path, **changes: Any) -> InProcess:
        run = build(proxy, settings(directory, run=name, **changes), self.shared)
        self.runs[name], self.proxies[name] = run, proxy
        earlier = proxy.before_commit

        def note() -> None:
            earlier()
            self.made.append(name)

        proxy.before_commit = note
        return run

    def connect(self, name: str) -> ProxyClient:
        """Return a client that waits for the proxy of a run."""
        return ProxyClient("http://proxy", KEY, RUN, transport=self.proxies[name].transport(), pause=moment)

    def begin(self, name: str, _patience: float) -> RunTrainer:
        return self.runs[name].parts

    def train(self, until: Callable[[], bool] | None = None) -> None:
        """Train until the condition holds for the steps so far; None: until all runs have ended."""
        for run in self.runs.values():
            make = run.loop.versions.make

            def checked(*arguments: Any, make: Callable[..., Any] = make, **named: Any) -> Any:
                head = make(*arguments, **named)
                if until is not None and until():
                    raise Enough
                return head

            run.loop.versions.make = checked  # type: ignore[method-assign]
        roster = Roster(self.runs, self.connect, self.changed)
        course = Turns(roster, self.begin, ALONE, self.changed, self.failed)
        if until is None:
            course.run()
            return
        with pytest.raises(Enough):
            course.run()


@pytest.fixture
def together() -> Iterator[Together]:
    made = Together()
    yield made
    with ExitStack() as ending:
        for run in made.runs.values():
            ending.callback(run.parts.ending.close)


def shifted(by: int) -> Callable[[int], TrajectoryGroup]:
    """Return groups that differ from those of another number."""
    source = random_groups()
    return lambda version: source(version + by)


Versions = dict[str, list[tuple[str, str]]]
"""Digests of the weights and of the configuration of each version, by run."""


def proxies_of(names: Iterable[str], base: Path) -> dict[str, TrainingProxy]:
    """Return proxies with different trajectories."""
    return {
        name: TrainingProxy(base_model=str(base), source=shifted(100 * number)) for number, name in enumerate(names)
    }


def versions_of(proxies: Mapping[str, TrainingProxy]) -> Versions:
    """Return the first three versions."""
    return {
        name: [(commit.weights.sha256, commit.step.config_hash) for commit in proxy.commits[:3]]
        for name, proxy in proxies.items()
    }


def alone(start: Start, base: Path, directory: Path, configured: Mapping[str, dict[str, Any]]) -> Versions:
    proxies = proxies_of(configured, base)
    for name, changes in configured.items():
        trainer = start(proxies[name], settings(directory / name, **changes))
        trainer.loop.resume()
        for _ in range(3):
            trainer.loop.step()
    return versions_of(proxies)


def in_turns(together: Together, base: Path, directory: Path, configured: Mapping[str, dict[str, Any]]) -> Versions:
    proxies = proxies_of(configured, base)
    for name, changes in configured.items():
        together.add(name, proxies[name], directory / name, **changes)
    together.train(lambda: all(len(proxy.commits) >= 3 for proxy in proxies.values()))
    return versions_of(proxies)


def test_the_weights_are_those_of_runs_that_train_alone(
    together: Together, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    """Runs of several configurations, with momentum, a schedule, a critic and a reference that must stay separate."""
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 3, "weight_decay": 0.1}
    configured: dict[str, dict[str, Any]] = {
        "plain": {"optimizer": optimizer},
        "held": {"optimizer": {"learning_rate": 1e-3}, "algorithm": {"kl_coefficient": 0.1}, "seed": 5},
        "critic": {"algorithm": {"preset": "ppo"}},
    }
    wanted = alone(start, tiny_model, tmp_path / "alone", configured)
    assert in_turns(together, tiny_model, tmp_path / "together", configured) == wanted


def test_adapters_over_one_base_are_those_of_runs_that_train_alone(
    together: Together, start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    """Adapters of different shapes and seeds share one base as their reference, beside a run that trains all
    weights."""
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 3, "weight_decay": 0.1}
    configured: dict[str, dict[str, Any]] = {
        "one": {"optimizer": optimizer, "adapter": {"rank": 2}, "algorithm": {"kl_coefficient": 0.1}},
        "two": {"optimizer": optimizer, "adapter": {"rank": 4, "publish": "merged"}, "seed": 5},
        "whole": {"optimizer": optimizer},
    }
    wanted = alone(start, tiny_model, tmp_path / "alone", configured)
    assert in_turns(together, tiny_model, tmp_path / "together", configured) == wanted
    one, two = (together.runs[name].model for name in ("one", "two"))
    assert isinstance(one, AdaptedPolicy)
    assert isinstance(two, AdaptedPolicy)
    assert one.adapters.model is two.adapters.model


def test_a_run_without_trajectories_delays_no_other_and_is_woken(
    together: Together, tiny_model: Path, tmp_path: Path
) -> None:
    """`late` waits at its proxy until the others have made five versions."""
    late = TrainingProxy(base_model=str(tiny_model))
    busy = TrainingProxy(base_model=str(tiny_model), source=random_groups())

    def offer() -> None:
        if busy.version == 5:
            late.offer([random_groups()(0), random_groups()(1)])

    busy.before_commit = offer
    together.add("late", late, tmp_path / "late", batch={"wait_seconds": 60})
    together.add("busy", busy, tmp_path / "busy")
    together.train(lambda: bool(late.commits))
    assert len(busy.commits) > 5


def test_a_prefetched_claim_keeps_its_lease_while_another_run_trains(
    together: Together, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slow` makes no step until the prefetched batch of `waits` has been renewed three times."""
    monkeypatch.setattr(leases, "LONGEST_PAUSE", leases.SHORTEST_PAUSE)
    waits = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    slow = TrainingProxy(base_model=str(tiny_model), source=random_groups())

    def hold() -> None:
        waits.wait_for(lambda: len(waits.claimed) > len(waits.commits))
        (claim,) = waits.leases
        renewed = waits.heartbeats.count(claim)
        waits.wait_for(lambda: waits.heartbeats.count(claim) >= renewed + 3)

    slow.before_commit = hold
    together.add("slow", slow, tmp_path / "slow")
    together.add("waits", waits, tmp_path / "waits")
    together.train(lambda: bool(slow.commits and waits.commits))
    assert waits.released == []


def test_runs_that_cannot_go_on_end_alone(together: Together, tiny_model: Path, tmp_path: Path) -> None:
    """One run cannot write its weights, one is gone from its proxy: the log names both, and the third goes on."""
    full, deleted, well = (TrainingProxy(base_model=str(tiny_model), source=random_groups()) for _ in range(3))

    def break_both() -> None:
        if len(well.commits) == 1:
            shutil.rmtree(tmp_path / "full")
            (tmp_path / "full").touch()
            deleted.is_deleted = True

    well.before_commit = break_both
    for name, proxy in (("full", full), ("deleted", deleted), ("well", well)):
        together.add(name, proxy, tmp_path / name)
    with capture_logs(processors=[merge_contextvars]) as logs:
        together.train(lambda: len(together.failed) == 2 and len(well.commits) > 4)
    assert {name: type(error) for name, error in together.failed.items()} == {
        "full": WeightsUnusable,
        "deleted": ProxyRefused,
    }
    said = {entry["run"]: entry for entry in logs if entry["log_level"] == "error"}
    assert said["full"]["error"] == "WeightsUnusable"
    assert "no such run" in said["deleted"]["reason"]
    assert all("well" in entry["others"] for entry in said.values())


def test_a_proxy_that_is_down_delays_other_runs_only_briefly(
    together: Together, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is down during a commit, until the other run has made three more steps. The claim is then trained,
    once."""
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    offered = [random_groups()(version) for version in range(4)]
    away, well = TrainingProxy(base_model=str(tiny_model)), TrainingProxy(base_model=str(tiny_model))
    well.source = random_groups()
    away.offer(offered)

    def fall() -> None:
        if len(away.commits) == 1:
            away.before_commit = lambda: None
            away.outage = 1_000_000
            well.before_commit = partial(come_back, len(well.commits) + 3)
            raise ConnectionAbortedError

    def come_back(version: int) -> None:
        if len(well.commits) == version:
            away.outage = 0

    away.before_commit = fall
    run = together.add("away", away, tmp_path / "away")
    run.parts.connection.client.pause = moment
    together.add("well", well, tmp_path / "well")
    with capture_logs(processors=[merge_contextvars]) as logs:
        together.train(lambda: len(away.consumed) == 20)
    assert together.failed == {}
    assert set(away.consumed.values()) == {1}
    assert [entry["run"] for entry in logs if entry["event"].startswith("giving the step up")] == ["away"]


def test_it_ends_when_no_run_is_left(together: Together, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
        together.add(name, proxy, tmp_path / name)
        proxy.is_deleted = True
    together.train()
    assert set(together.failed) == {"one", "two"}


def test_a_run_that_is_rolled_back_starts_again_from_its_head(
    together: Together, tiny_model: Path, tmp_path: Path
) -> None:
    moved, well = (TrainingProxy(base_model=str(tiny_model), source=random_groups()) for _ in range(2))

    def move() -> None:
        if len(well.commits) == 2:
            moved.move_head(7, None)

    well.before_commit = move
    together.add("moved", moved, tmp_path / "moved")
    together.add("well", well, tmp_path / "well")
    together.train(lambda: moved.version >= 9 and well.version >= 4)
    assert well.version == len(well.commits)
    assert together.failed == {}


def test_each_run_reports_its_own_times(together: Together, tiny_model: Path, tmp_path: Path) -> None:
    proxies = [TrainingProxy(base_model=str(tiny_model), source=random_groups()) for _ in range(2)]
    for name, proxy in zip("ab", proxies, strict=True):
        together.add(name, proxy, tmp_path / name)
    together.train(lambda: all(len(proxy.commits) >= 3 for proxy in proxies))
    elsewhere = []
    for proxy in proxies:
        for metrics in (commit.step.metrics for commit in proxy.commits):
            phases = {name: value for name, value in metrics.items() if name.startswith("seconds_")}
            assert set(phases) <= documented_metrics()
            assert metrics["trainer_idle_ratio"] == pytest.approx(phases["seconds_claim"] / sum(phases.values()))
            elsewhere.append(phases.get("seconds_other_runs", 0.0))
    assert max(elsewhere) > 0


def test_a_trace_is_of_one_run_alone(together: Together, tiny_model: Path, tmp_path: Path) -> None:
    """Both runs request traces of the first two steps; torch's profiler serves one at a time."""
    proxies = {name: TrainingProxy(base_model=str(tiny_model), source=random_groups()) for name in "ab"}
    for name, proxy in proxies.items():
        traced = {"first": 1, "steps": 2, "directory": str(tmp_path / "profiles" / name)}
        together.add(name, proxy, tmp_path / name, profile=traced)
    together.train(lambda: all(len(proxy.commits) >= 6 for proxy in proxies.values()))
    for name in proxies:
        (trace,) = (tmp_path / "profiles" / name).glob("run_test/*.json")
        assert [phase for phase, _, _ in ranges(trace)] == list(PHASES) * 2
        assert any(event["name"] == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
