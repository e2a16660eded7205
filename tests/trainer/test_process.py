"""The trainer as a real process: killed, asked to end, misconfigured, and as two processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.serve_trainer import Kills, forked_trainer
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import settings

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("forked")]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1)], ids=["alone", "other sizes"])
def test_kills_during_a_step_lose_and_repeat_nothing(
    tiny_model: Path, tmp_path: Path, sizes: tuple[int, int, int]
) -> None:
    """Kill the first rank twice with the weights written and the commit sent: the first commit reaches the proxy, the
    second does not. Each restart may have another number of ranks."""
    source = random_groups()
    proxy = TrainingProxy(base_model=str(tiny_model), lease_seconds=2.0)
    offered = [source(version) for version in range(8)]
    proxy.offer(offered)
    kills = Kills(arrives=[True, False])
    log = tmp_path / "log"
    with proxy.serve() as url:
        with forked_trainer(url, tmp_path / "weights", log, size=sizes[0]) as process:
            proxy.wait_for(lambda: len(proxy.commits) == 1)
            proxy.before_commit = kills
            kills.victims.append(process.pid)
            assert process.wait(60) != 0
        with forked_trainer(url, tmp_path / "weights", log, size=sizes[1]) as process:
            kills.victims.append(process.pid)
            assert process.wait(60) != 0
        assert kills.arrives == []
        with forked_trainer(url, tmp_path / "weights", log, size=sizes[2]) as process:
            proxy.wait_for(lambda: len(proxy.consumed) == 40)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    sessions = {trajectory.session_id for group in offered for trajectory in group.trajectories}
    assert proxy.consumed == dict.fromkeys(sessions, 1)
    assert len(list((tmp_path / "weights").glob("*/v*"))) == proxy.version == len(proxy.commits)


def test_the_trainer_ends_promptly_and_releases_its_claim(tiny_model: Path, tmp_path: Path) -> None:
    """Ask the trainer to end while it waits for a proxy that drops every commit."""
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    log = tmp_path / "log"
    with proxy.serve() as url, forked_trainer(url, tmp_path / "weights", log) as process:

        def cut_off() -> None:
            process.send_signal(signal.SIGTERM)
            raise ConnectionAbortedError

        proxy.before_commit = cut_off
        assert process.wait(60) == 0
    assert proxy.commits == []
    assert proxy.leases == {}
    assert len(proxy.released) == 1
    assert "ended by a signal" in log.read_text()


def test_a_trainer_started_after_a_kill_gets_the_dead_ones_claims_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """A trainer that starts after a kill gets the dead one's claims, but not those of a living one with the same
    name."""
    proxy = TrainingProxy(base_model=str(tiny_model), lease_seconds=1000.0)
    proxy.offer([random_groups()(0)])
    log = tmp_path / "log"
    weights, wait = tmp_path / "weights", ("--set", "batch.wait_seconds=1")

    def cut_off() -> None:
        raise ConnectionAbortedError

    with proxy.serve() as url:
        proxy.before_commit = cut_off  # it holds its claim, and tries again
        with forked_trainer(url, weights, log, *wait) as killed:
            proxy.wait_for(lambda: len(proxy.leases) == 1)
            proxy.offer([random_groups()(1)])
            with forked_trainer(url, weights, log, *wait) as lives:
                proxy.wait_for(lambda: len(proxy.leases) == 2)
                first, second = proxy.claimed
                killed.kill()
                killed.wait()
                with forked_trainer(url, weights, log, *wait):
                    proxy.wait_for(lambda: len(proxy.claimed) == 3)
                assert lives.poll() is None
                assert proxy.released == [first]
                assert second in proxy.leases
    assert "an earlier trainer died" in log.read_text()


def test_a_wrong_key_ends_the_trainer_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    log = tmp_path / "log"
    with (
        proxy.serve() as url,
        forked_trainer(url, tmp_path / "weights", log, "--set", "api_key=rl-other") as process,
    ):
        assert process.wait(60) == 1
    assert "trainer.api_key is not a key of this proxy" in log.read_text()


@pytest.mark.parametrize(
    "options",
    [("algorithm.preset=grpo",), ("algorithm.preset=ppo",), ("algorithm.preset=ppo", "backend=archon", "layout=c2")],
)
def test_two_processes_equal_one(start: Start, tiny_model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Two ranks on gloo, three micro-batches per step, resumed in between from the state of one process; with
    different rows, and with halves of the same rows."""
    preset = options[0].partition("=")[2]
    steps, small = 3, {"batch": {"max_tokens_per_microbatch": 32}, "algorithm": {"preset": preset}}
    alone_proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    alone = start(alone_proxy, settings(tmp_path / "alone", **small))
    alone.loop.resume()
    for _ in range(steps):
        alone.loop.step()

    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    first = start(proxy, settings(tmp_path / "together", **small))
    first.loop.resume()
    first.loop.step()
    log = tmp_path / "log"
    bound = [word for option in ("batch.max_tokens_per_microbatch=32", *options) for word in ("--set", option)]
    with proxy.serve() as url, forked_trainer(url, tmp_path / "together", log, *bound, size=2) as process:
        proxy.wait_for(lambda: len(proxy.commits) >= steps or process.poll() is not None)
        process.terminate()
        process.wait(60)
    assert len(proxy.commits) >= steps, log.read_text()
    wanted = load_file(Path(alone_proxy.commits[-1].weights.uri) / "model.safetensors")
    found = load_file(Path(proxy.commits[steps - 1].weights.uri) / "model.safetensors")
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0.0)
    ours, theirs = (each.commits[steps - 1].step for each in (alone_proxy, proxy))
    for metric in ("gradient_norm", "loss", "entropy", "tokens", "logprob_gap_max"):
        assert theirs.metrics[metric] == pytest.approx(ours.metrics[metric], rel=1e-4, abs=1e-5)
    wanted_advantages = [audit.advantage for audit in ours.audit]
    assert [audit.advantage for audit in theirs.audit] == pytest.approx(wanted_advantages, rel=1e-4, abs=1e-5)
