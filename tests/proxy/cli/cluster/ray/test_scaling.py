"""The number of engines: what is asked for by hand, and what the load asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.cluster.ray.scaling import Change, LoadRule, WantedEngines
from proxy.cli.console import Refused
from proxy.settings import ConfigurationError, load_settings

BUSY_S, IDLE_S = 10.0, 60.0


def rule(**settings: Any) -> LoadRule:
    given = {"max_engines": 3, "calls_per_engine": 4, "idle_seconds": IDLE_S, **settings}
    return LoadRule(load_settings(None, {"ray": given}).ray)


def engines(*calls: int, state: str = "ready") -> dict[str, dict[str, Any]]:
    return {f"shop-ray-{number}": {"calls": each, "state": state} for number, each in enumerate(calls, start=1)}


def test_a_number_reaches_the_command_once(tmp_path: Path) -> None:
    placing, asking = WantedEngines(tmp_path, "shop"), WantedEngines(tmp_path, "shop")
    placing.begin()
    assert placing.take() is None
    asking.ask(2)
    asking.ask(4)
    assert placing.take() == 4, "the last one counts"
    assert placing.take() is None
    asking.ask(1)
    placing.begin()
    assert placing.take() is None, "a new start begins with the configured number"


def test_nothing_is_asked_of_a_command_that_does_not_run(tmp_path: Path) -> None:
    wanted = WantedEngines(tmp_path, "shop")
    with pytest.raises(Refused, match="no `base-rl up --ray` runs for shop"):
        wanted.ask(2)
    wanted.begin()
    (running,) = (tmp_path / "ray").iterdir()
    os.utime(running, (1, 1))  # killed long ago
    with pytest.raises(Refused, match="--data-dir"):
        wanted.ask(2)
    wanted.touch()
    wanted.ask(2)
    wanted.end()
    with pytest.raises(Refused):
        wanted.ask(2)
    assert [path.suffix for path in (tmp_path / "ray").iterdir()] == [".engines"]


def test_an_engine_is_added_when_calls_queue_and_not_for_a_burst() -> None:
    load = rule()
    assert load.decide(engines(5), 1, 0.0) is None
    assert load.decide(engines(3), 1, 5.0) is None
    assert load.decide(engines(5), 1, 6.0) is None
    assert load.decide(engines(5), 1, 6.0 + BUSY_S - 0.1) is None
    change = load.decide(engines(5), 1, 6.0 + BUSY_S)
    assert change == Change(reason="5 calls are under way at 1 engines")


def test_none_is_added_before_the_last_one_is_ready_or_beyond_the_bound() -> None:
    load = rule()
    for now in (0.0, BUSY_S, 2 * BUSY_S):
        assert load.decide(engines(9), 2, now) is None, "the second one is being placed"
    assert load.decide(engines(9, 9), 2, 3 * BUSY_S) is not None
    load = rule()
    for now in (0.0, BUSY_S, 2 * BUSY_S):
        assert load.decide(engines(9, 9, 9), 3, now) is None


def test_the_last_idle_engine_is_removed_and_the_fewest_stay() -> None:
    load = rule(min_engines=1)
    assert load.decide(engines(0, 1, 0), 3, 0.0) is None
    assert load.decide(engines(0, 1, 0), 3, IDLE_S - 1) is None
    assert load.decide(engines(0, 1, 1), 3, IDLE_S) == Change(remove="shop-ray-1", reason="no call for 60 s"), (
        "a call to the third one began its time anew"
    )
    assert load.decide(engines(0, 0, 0), 1, 9 * IDLE_S) is None


def test_an_engine_that_is_not_ready_is_neither_busy_nor_idle() -> None:
    load = rule()
    for now in (0.0, IDLE_S, 2 * IDLE_S):
        assert load.decide(engines(0, 9, state="down"), 2, now) is None


def test_without_a_bound_nothing_changes() -> None:
    assert not LoadRule(load_settings(None).ray).acts
    assert rule().acts


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_engines is 1, less than min_engines, 2"):
        rule(max_engines=1, min_engines=2)
