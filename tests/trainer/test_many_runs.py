"""Several runs on one trainer: at the real proxy, and as real processes that are killed and asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file

from tests.fakes.training_proxy import KEY, TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.real_proxy import ADMIN, RUN, RealProxy, real_proxy, write_real_model
from tests.trainer.serve_trainer import TORCHRUN, forked_trainer, trainer_process
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import ALONE, settings
from trainer.__main__ import main
from trainer.assembly import RunTrainer, Shared, begin
from trainer.proxy_client import ProxyClient
from trainer.rotation.roster import Roster
from trainer.rotation.turns import Turns

CHANGES: dict[str, dict[str, Any]] = {
    RUN: {"api_key": ADMIN},
    "second": {"api_key": ADMIN, "algorithm": {"preset": "rloo"}, "optimizer": {"learning_rate": 3e-3}, "seed": 2},
}


class Enough(BaseException):
    """Raised when the test has seen enough."""


def give(proxy: RealProxy, run: str) -> None:
    """Offer three batches of eight."""
    for rewards in ([1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0]) * 3:
        proxy.group(rewards, run=run)


def train(proxy: RealProxy, *names: str) -> dict[str, str]:
    """Train three versions of each run and return the digests of the last weights."""
    changed = Condition()
    shared = Shared(torch.device("cpu"), changed if len(names) > 1 else None)
    with ExitStack() as ending:
        runs: list[RunTrainer] = []
        for name in names:
            configured = proxy.settings(run=name, batch={"wait_seconds": 0.1}, **CHANGES[name])
            runs.append(begin(name, configured, ALONE, "a-process", shared))
            ending.callback(runs[-1].ending.close)
        torch.set_flush_denormal(True)
        ending.callback(torch.set_flush_denormal, False)
        begun = {run.name: run for run in runs}
        clients = {run.name: ProxyClient(proxy.url, ADMIN, run.name) for run in runs}
        if len(runs) == 1:
            runs[0].loop.resume()
            for _ in range(3):
                runs[0].loop.step()
        else:
            roster = Roster([run.name for run in runs], lambda name: clients[name], changed)
            with pytest.raises(Enough):
                _WatchedTurns(roster, lambda name, _patience: begun[name], ALONE, changed, {}).run()
            health = {run["name"]: run["trainer"] for run in proxy.health()["runs"]}
            assert health == dict.fromkeys(names, "active")
        assert proxy.problems() == []
        heads = {run.name: run.loop.head for run in runs}
    assert {head.version for head in heads.values()} == {3}
    return {name: head.weights.sha256 for name, head in heads.items() if head.weights is not None}


class _WatchedTurns(Turns):
    """Turns that end the trainer when every run has made three versions."""

    def _next(self) -> Any:
        # The runs are private: stopping between two turns is needed by this test alone.
        is_complete = len(self._runs) == len(CHANGES) and not self._to_resume
        if is_complete and all(run.loop.head.version == 3 for run in self._runs.values()):
            raise Enough
        return super()._next()


def test_several_runs_have_the_weights_of_separate_trainers(tmp_path: Path) -> None:
    base = write_real_model(tmp_path / "base")
    wanted: dict[str, str] = {}
    with real_proxy(tmp_path / "alone", base) as proxy:
        proxy.add_run("second")
        for name in CHANGES:
            give(proxy, name)
            wanted |= train(proxy, name)
    with real_proxy(tmp_path / "together", base) as proxy:
        proxy.add_run("second")
        for name in CHANGES:
            give(proxy, name)
        assert train(proxy, *CHANGES) == wanted
        for name in CHANGES:
            claims = proxy.get("/claims", run=name)["claims"]
            assert [(claim["state"], claim["process"]) for claim in claims] == [("committed", "a-process")] * 3


def told(proxies: Mapping[str, TrainingProxy], directory: Path, serving: ExitStack) -> dict[str, dict[str, Any]]:
    """Write `[trainer.runs]` with a proxy on a port for each run, and one run that its proxy does not know."""
    runs = {
        name: {
            "run": "policy",
            "proxy_url": serving.enter_context(proxy.serve()),
            "api_key": KEY,
            "weights": {"directory": str(directory / name)},
        }
        for name, proxy in proxies.items()
    }
    return {**runs, "lost": {**next(iter(runs.values())), "run": "other"}}


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("forked")
def test_a_kill_loses_and_repeats_nothing_of_any_run(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """The trainer is killed during a commit of one run, while it holds a batch of the other. Then two processes
    continue and reach the weights of trainers that trained each run alone, while a third run is deleted and a fourth
    never existed."""
    names = ("one", "two")
    offered = {name: [random_groups()(version) for version in range(8)] for name in names}
    wanted = {}
    for name in names:
        alone_proxy = TrainingProxy(base_model=str(tiny_model))
        alone_proxy.offer(offered[name])
        alone = start(alone_proxy, settings(tmp_path / "alone" / name))
        alone.loop.resume()
        for _ in range(4):
            alone.loop.step()
        wanted[name] = alone.weights()

    proxies = {name: TrainingProxy(base_model=str(tiny_model), lease_seconds=1000.0) for name in names}
    gone = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    victims: list[int] = []

    def kill_once() -> None:
        if victims:
            proxies["two"].offer(offered["two"][4:])
            proxies["two"].wait_for(lambda: bool(proxies["two"].leases))
            os.kill(victims.pop(), signal.SIGKILL)
            raise ConnectionAbortedError

    def delete() -> None:
        gone.is_deleted = True

    log, nowhere = tmp_path / "log", "http://127.0.0.1:9"
    with ExitStack() as serving:
        runs = told({**proxies, "gone": gone}, tmp_path, serving)
        given = ("--set", f"runs={json.dumps(runs)}")
        # The other run gets its second half when the first one commits, so that it holds a batch then.
        proxies["one"].offer(offered["one"])
        proxies["two"].offer(offered["two"][:4])
        with forked_trainer(nowhere, tmp_path, log, *given, run=None) as process:
            proxies["one"].wait_for(lambda: len(proxies["one"].commits) == 1)
            victims.append(process.pid)
            proxies["one"].before_commit = kill_once
            assert process.wait(60) == -signal.SIGKILL
        proxies["one"].before_commit = delete
        with trainer_process(nowhere, tmp_path, log, *given, launcher=TORCHRUN, run=None) as launched:
            for proxy in proxies.values():
                proxy.wait_for(lambda proxy=proxy: len(proxy.consumed) == 40 or launched.poll() is not None)  # type: ignore[misc]
            proxies["one"].wait_for(lambda: dropped(log) == {"gone", "lost"} or launched.poll() is not None)
            launched.terminate()
            launched.wait(60)
    said = log.read_text()
    for name, proxy in proxies.items():
        sessions = {trajectory.session_id for group in offered[name] for trajectory in group.trajectories}
        assert proxy.consumed == dict.fromkeys(sessions, 1), said
        assert len(list((tmp_path / name).glob("*/v*"))) == proxy.version == len(proxy.commits) == 4
        found = load_file(Path(proxy.commits[-1].weights.uri) / "model.safetensors")
        for weight, value in wanted[name].items():
            torch.testing.assert_close(found[weight], value, atol=1e-5, rtol=0.0)
    assert dropped(log) == {"gone", "lost"}
    assert "trainer.run: is 'other' a run of the proxy" in said


def dropped(log: Path) -> set[str]:
    """Return the runs of which a trainer's log says that they are not trained any more."""
    # The last line may be half written.
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if re.match(r"{.*}\n$", line)]
    return {line["run"] for line in lines if line["event"] == "this run is not trained any more"}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undo the changes that `main` makes to its process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    logging, threads = structlog.get_config(), torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    structlog.configure(**logging)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("as_before")
def test_the_exit_status_shows_that_a_run_failed(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a signal, all claims are released; if no run is left, the trainer ends at once."""
    proxies = {name: TrainingProxy(base_model=str(tiny_model), source=random_groups()) for name in ("one", "two")}

    signals = [signal.SIGTERM]

    def end() -> None:
        if len(proxies["one"].commits) == 1:
            # Once: the commit is tried again on a thread of its own, and a second signal kills.
            while signals:
                proxies["two"].wait_for(lambda: bool(proxies["two"].leases))
                os.kill(os.getpid(), signals.pop())
            raise ConnectionAbortedError

    proxies["one"].before_commit = end
    with ExitStack() as serving:
        runs = told(proxies, tmp_path, serving)
        small = ["--set", "device=cpu", "--set", "threads=1", "--set", "batch.trajectories=8"]
        assert main([*small, "--set", f"runs={json.dumps(runs)}"]) == 1
        assert "ended by a signal" in capsys.readouterr().err
        for proxy in proxies.values():
            assert proxy.leases == {}
            assert len(proxy.claimed) == len(proxy.commits) + len(proxy.released)
            proxy.is_deleted = True
        assert main([*small, "--set", f"runs={json.dumps(runs)}"]) == 1
    said = capsys.readouterr().err
    assert said.count("this run is not trained any more") == 3
    assert "ended by a signal" not in said


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("forked")
def test_two_ranks_train_all_active_runs_of_a_proxy_as_they_come_and_go(tmp_path: Path) -> None:
    """Adapters over one sharded base: a run is paused and another one is created while the trainer works."""
    base, log = write_real_model(tmp_path / "base"), tmp_path / "log"
    words = (
        "--runs",
        "all",
        "--set",
        f"api_key={ADMIN}",
        "--set",
        "adapter.rank=2",
        "--set",
        "adapter.publish=merged",
    )
    with real_proxy(tmp_path, base) as proxy:
        proxy.add_run("second")
        give(proxy, RUN)
        give(proxy, "second")
        with forked_trainer(proxy.url, proxy.weights, log, *words, size=2, run=None) as process:

            def wait_for(condition: Callable[[], bool]) -> None:
                deadline = time.monotonic() + 120.0
                while not condition():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    threading.Event().wait(0.1)

            def versions(run: str) -> int:
                return len(proxy.get("/versions", run=run)["versions"]) - 1

            wait_for(lambda: versions(RUN) >= 1 and versions("second") >= 1)
            proxy.post("/pause")
            wait_for(lambda: "the run is not active any more" in log.read_text())
            proxy.add_run("third")
            give(proxy, "third")
            wait_for(lambda: versions("third") >= 1)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        assert {line["run"] for line in lines if line["event"].startswith("the run is not active")} == {RUN}
        assert not [line for line in lines if line["level"] == "error"]
