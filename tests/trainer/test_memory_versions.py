"""Versions that are committed from memory: a trainer that dies before they are on the disk loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.cli.addresses import random_free_port
from proxy.engines.launch import embedded_plan, wait_until_ready
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import real_proxy, write_real_model
from tests.trainer.serve_trainer import Kills, forked_trainer
from tests.trainer.test_behind import batches
from tests.trainer.test_loop import random_groups, same
from tests.trainer.tiny import InProcess, settings
from trainer.config import TrainerSettings
from trainer.errors import WeightsUnusable
from trainer.publish.tensors import TensorsPublisher

BATCH: dict[str, Any] = {"trajectories": 4, "at_least": 4, "wait_seconds": 5.0, "max_staleness": 8}


def in_memory(directory: Path, **weights: Any) -> dict[str, Any]:
    return {"type": "tensors", "memory_directory": str(directory / "memory"), **weights}


def configured(directory: Path, **weights: Any) -> TrainerSettings:
    return settings(directory / "weights", batch=BATCH, weights=in_memory(directory, **weights))


def directories(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "weights").glob("run_test/v*"))


def test_versions_are_those_of_the_disk(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    found: list[list[tuple[str, bool]]] = []
    for weights in ({}, in_memory(tmp_path), in_memory(tmp_path, behind=None)):
        proxy = TrainingProxy(base_model=str(tiny_model))
        batches(proxy, 4)
        chosen = {**BATCH, "wait_seconds": 0.2}
        trainer = start(proxy, settings(tmp_path / f"weights-{len(found)}", batch=chosen, weights=weights))
        trainer.loop.resume()
        for _ in range(4):
            trainer.loop.step()
        trainer.loop.step()  # finds no batch, and waits for the version behind
        assert proxy.is_saved
        assert proxy.leases == {}
        assert all(Path(commit.weights.uri).is_dir() for commit in proxy.commits)
        found.append([(commit.weights.sha256, commit.claim_ids != ()) for commit in proxy.commits])
    assert len(found[0]) == 4
    assert found[0] == found[1] == found[2]


def steps(trainer: InProcess, count: int) -> None:
    for _ in range(count):
        trainer.loop.step()


class Killed(BaseException):
    """The end of a trainer at a chosen place."""


@pytest.mark.parametrize("behind", [False, None])
@pytest.mark.parametrize("is_memory_lost", [False, True])
def test_a_version_that_never_reached_the_disk_is_trained_again(
    start: Start,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behind: bool | None,
    is_memory_lost: bool,
) -> None:
    undisturbed = TrainingProxy(base_model=str(tiny_model))
    batches(undisturbed, 3)
    whole = start(undisturbed, configured(tmp_path / "whole"))
    whole.loop.resume()
    for _ in range(3):
        whole.loop.step()
    proxy = TrainingProxy(base_model=str(tiny_model))
    batches(proxy, 3)
    first = start(proxy, configured(tmp_path / "killed", behind=behind))
    first.loop.resume()
    first.loop.step()

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(TensorsPublisher, "save_copy", die)
        with pytest.raises(Killed):
            steps(first, 2)
    assert (proxy.version, proxy.is_saved) == (2, False)
    first.loop.versions.publisher.close()
    for claim_id in list(proxy.leases):  # as after the end of their process
        proxy.handle("POST", f"/api/v1/runs/policy/claims/{claim_id}/release", "Bearer rl-trainer-test", b"")
    if is_memory_lost:
        for path in sorted((tmp_path / "killed" / "memory").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    second = start(proxy, configured(tmp_path / "killed"))
    second.loop.resume()
    assert second.loop.head.version == 1
    assert [commit.weights.uri for commit in proxy.lost] != []
    for _ in range(2):
        second.loop.step()
    assert len(proxy.consumed) == len(undisturbed.consumed) == 12
    assert set(proxy.consumed.values()) == {1}
    assert same(second.weights(), whole.weights())
    assert len(directories(tmp_path / "killed")) == 3


def test_a_version_that_was_taken_back_meanwhile_is_given_up(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, configured(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()

    def lose_claims() -> None:
        for lease in proxy.leases.values():
            lease.expires_at = 0.0
        proxy.before_save = lambda: None

    proxy.before_save = lose_claims
    trainer.loop.step()  # refused, and resumed from the head
    assert (proxy.version, proxy.is_saved, len(proxy.lost)) == (1, True, 1)
    assert trainer.loop.head.version == 1
    trainer.loop.step()
    assert proxy.version == 2
    assert set(proxy.consumed.values()) == {1}
    assert len(directories(tmp_path)) == 2


def test_a_disk_that_refuses_the_copy_ends_the_trainer_and_takes_the_version_back(
    start: Start, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, configured(tmp_path))
    trainer.loop.resume()

    def refuse(*_: Any) -> None:
        raise WeightsUnusable("cannot write version 1: no space")

    monkeypatch.setattr(TensorsPublisher, "save_copy", refuse)
    with pytest.raises(WeightsUnusable, match="no space"):
        trainer.loop.step()
    assert (proxy.version, proxy.is_saved, len(proxy.lost)) == (0, True, 1)
    assert list((tmp_path / "memory").glob("run_test/*")) == []
    assert proxy.consumed == {}


@contextmanager
def embedded_engine(model: Path) -> Iterator[str]:
    plan = embedded_plan(model=str(model), port=random_free_port("127.0.0.1"))
    process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env})
    try:
        asyncio.run(wait_until_ready(plan.url, timeout=120, process_alive=lambda: process.poll() is None))
        yield plan.url
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(300)
def test_a_real_engine_serves_what_a_dying_trainer_left_in_memory_until_it_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_real_model(tmp_path / "base")
    weights = {"type": "tensors", "memory_directory": tmp_path / "memory"}

    def die(*_: Any) -> None:
        raise Killed

    with embedded_engine(base) as url, real_proxy(tmp_path, base, url) as proxy:
        sessions = [*proxy.group([1.0, 0.0]), *proxy.group([0.0, 1.0])]
        batch = {"trajectories": 2}
        with proxy.trainer(weights=weights, batch=batch) as first:
            first.loop.step()
            proxy.get_when("/versions", lambda answer: answer["serving"] == 1)
            with monkeypatch.context() as patched:
                patched.setattr(TensorsPublisher, "save_copy", die)
                with pytest.raises(Killed):
                    first.loop.step()
            proxy.get_when("/versions", lambda answer: answer["head"] == answer["serving"] == 2)
            served = httpx.get(f"{url}/model_info").json()
            assert Path(served["model_path"]).parents[1] == tmp_path / "memory"
        with proxy.trainer("another", weights=weights, batch=batch) as second:
            assert second.loop.head.version == 1
            proxy.get_when("/versions", lambda answer: answer["head"] == answer["serving"] == 1)
            second.parts.connection.client.release_abandoned("a-process")
            second.loop.step()
            found = proxy.get_when("/versions", lambda answer: answer["versions"][0]["state"] == "serving")
        states = {each["version"]: each["state"] for each in found["versions"]}
        assert states == {3: "serving", 2: "rolled_back", 1: "retired", 0: "retired"}
        consumed = [proxy.do(proxy.world.session_row(session)).consumed_by for session in sessions]
        assert sorted(consumed) == [1, 1, 3, 3]


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("forked")
def test_kills_around_the_save_lose_and_repeat_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Kill the trainer twice with the version committed and on the disk: the first report of that reaches the proxy,
    the second does not."""
    source = random_groups()
    proxy = TrainingProxy(base_model=str(tiny_model), lease_seconds=2.0)
    offered = [source(version) for version in range(8)]
    proxy.offer(offered)
    kills = Kills(arrives=[True, False])
    options = [f"weights.{key}={value}" for key, value in in_memory(tmp_path).items()]
    chosen = [part for option in options for part in ("--set", option)]
    log = tmp_path / "log"
    with proxy.serve() as url:
        with forked_trainer(url, tmp_path / "weights", log, *chosen) as process:
            proxy.wait_for(lambda: len(proxy.saved) == 1)
            proxy.before_save = kills
            kills.victims.append(process.pid)
            assert process.wait(60) == -signal.SIGKILL
        with forked_trainer(url, tmp_path / "weights", log, *chosen) as process:
            kills.victims.append(process.pid)
            assert process.wait(60) == -signal.SIGKILL
        assert kills.arrives == []
        with forked_trainer(url, tmp_path / "weights", log, *chosen) as process:
            proxy.wait_for(lambda: len(proxy.consumed) == 40)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    sessions = {trajectory.session_id for group in offered for trajectory in group.trajectories}
    assert proxy.consumed == dict.fromkeys(sessions, 1)
    assert len(proxy.lost) == 1
    assert len(directories(tmp_path)) == proxy.version == len(proxy.commits)
