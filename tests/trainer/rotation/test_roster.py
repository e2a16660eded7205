"""Runs that arrive late, cannot be begun at first, and come and go at their proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.rotation.test_turns import Enough, Together, moment
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import ALONE
from trainer.assembly import RunTrainer
from trainer.errors import ConfigurationError, ProxyRefused, ProxySilent
from trainer.proxy_client import ProxyClient, RunLister
from trainer.rotation.following import Following
from trainer.rotation.roster import Roster
from trainer.rotation.turns import Turns

TRAINER = "rl-trainer-x"


class Several(Together):
    """Runs that are assembled when they begin. `paused_for` are the pauses of clients that wait for a proxy."""

    def __init__(self, base: Path, directory: Path) -> None:
        super().__init__()
        self.base, self.directory = base, directory
        self.begun: list[str] = []
        self.errors: dict[str, list[Exception]] = {}
        self.active: list[str] = []
        self.left: list[str] = []
        self.listings = 0
        self.paused_for: list[float] = []

    def proxy(self, name: str, **values: Any) -> TrainingProxy:
        self.proxies[name] = TrainingProxy(base_model=str(self.base), source=random_groups(), **values)
        return self.proxies[name]

    def connect(self, name: str) -> ProxyClient:
        client = super().connect(name)

        def pause(seconds: float) -> None:
            self.paused_for.append(seconds)
            moment(seconds)

        client.pause = pause
        return client

    def begin(self, name: str, _patience: float) -> RunTrainer:
        self.begun.append(name)
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        parts = self.add(name, self.proxies[name], self.directory / name).parts
        parts.ending.callback(self.left.append, name)
        parts.ending.callback(parts.connection.claims.leave)
        return parts

    def listed(self, request: httpx.Request) -> httpx.Response:
        if request.headers["authorization"] != f"Bearer {TRAINER}":
            return httpx.Response(403, json={"error": {"message": "this needs another key"}})
        self.listings += 1
        runs = [{"name": name, "state": "active"} for name in self.active]
        return httpx.Response(200, content=json.dumps({"runs": [{"name": "idle", "state": "paused"}, *runs]}))

    def course(self, *names: str, key: str | None = None) -> Turns:
        following = None
        if key is not None:
            lister = RunLister("http://proxy", key, transport=httpx.MockTransport(self.listed), pause=moment)
            following = Following(lister, self.changed)
        roster = Roster(names, self.connect, self.changed, following)
        return Turns(roster, self.begin, ALONE, self.changed, self.failed)


@pytest.fixture
def several(tiny_model: Path, tmp_path: Path) -> Iterator[Several]:
    made = Several(tiny_model, tmp_path)
    yield made
    with ExitStack() as ending:
        for run in made.runs.values():
            ending.callback(run.parts.ending.close)


def stop() -> None:
    raise Enough


def test_a_proxy_that_is_down_at_the_start_does_not_delay_the_others(several: Several) -> None:
    away, well = several.proxy("away", outage=1_000_000), several.proxy("well")

    def come_back() -> None:
        if len(well.commits) == 3:
            away.outage = 0

    well.before_commit, away.before_commit = come_back, stop
    with pytest.raises(Enough):
        several.course("away", "well").run()
    assert several.begun == ["well", "away"]
    assert len(well.commits) >= 3
    assert several.failed == {}


def test_a_run_that_cannot_be_begun_is_tried_again_after_growing_pauses(several: Several) -> None:
    silent = several.proxy("silent")
    several.errors["silent"] = [ProxySilent("gone again") for _ in range(3)]
    silent.before_commit = stop
    with pytest.raises(Enough):
        several.course("silent").run()
    assert several.begun == ["silent"] * 4
    assert several.paused_for == [5.0, 10.0, 20.0]


def test_a_run_that_is_refused_or_wrong_ends_alone(several: Several) -> None:
    several.proxy("gone").is_deleted = True
    several.proxy("wrong")
    several.errors["wrong"] = [ConfigurationError("run 'wrong' at its proxy: trainer.batsh: no such option")]
    well = several.proxy("well")

    def stop_after_others() -> None:
        if len(several.failed) == 2:
            raise Enough

    well.before_commit = stop_after_others
    with pytest.raises(Enough):
        several.course("gone", "wrong", "well").run()
    assert {name: type(error) for name, error in several.failed.items()} == {
        "gone": ProxyRefused,
        "wrong": ConfigurationError,
    }
    assert several.begun.count("wrong") == 1


def test_active_runs_are_picked_up_and_others_let_go_without_a_restart(several: Several) -> None:
    """`first` trains; `late` is created; `first` is paused, and later active again."""
    first, late = several.proxy("first"), several.proxy("late")
    several.active = ["first"]

    def create_late() -> None:
        if len(first.commits) == 2:
            several.active = ["first", "late"]
        if several.begun.count("first") == 2:
            raise Enough

    def pause_first() -> None:
        several.active = ["late", "first"] if several.left else ["late"]

    first.before_commit, late.before_commit = create_late, pause_first
    course = several.course(key=TRAINER)
    with pytest.raises(Enough):
        course.run()
    course.close()
    assert several.begun == ["first", "late", "first"]
    assert several.left[0] == "first"
    assert several.failed == {}
    assert len(late.commits) > 1
    assert len(first.claimed) == len(first.commits) + len(first.released)
    assert first.leases == late.leases == {}


def test_a_run_that_is_archived_is_let_go_without_an_error(several: Several) -> None:
    """The proxy refuses its requests before the list of active runs says so."""
    archived, well = several.proxy("archived"), several.proxy("well")

    def archive() -> None:
        archived.is_archived = True
        if several.left == ["archived"]:
            raise Enough

    well.before_commit = archive
    with pytest.raises(Enough):
        several.course("archived", "well").run()
    assert several.failed == {}


def test_a_run_that_failed_is_tried_again_when_it_is_active_again(several: Several) -> None:
    several.proxy("wrong").before_commit = stop
    well = several.proxy("well")
    several.errors["wrong"] = [ConfigurationError("the first time")]
    several.active = ["wrong", "well"]

    def mend() -> None:
        if len(well.commits) == 2:
            assert several.begun.count("wrong") == 1
            several.active = ["well"]
            # The second answer from now on is certainly of this list, and the next turn sees it.
            heard = several.listings + 2
            well.wait_for(lambda: several.listings >= heard)
        elif len(well.commits) == 4:
            several.active = ["well", "wrong"]

    well.before_commit = mend
    with pytest.raises(Enough):
        several.course(key=TRAINER).run()
    assert several.begun.count("wrong") == 2
    assert several.failed == {}


def test_a_key_that_may_not_list_runs_is_an_error(several: Several) -> None:
    with pytest.raises(ProxyRefused, match=r"GET /runs answered 403: this needs another key .*for every run"):
        several.course(key="rl-other").run()
