"""Steps with a model that runs out of memory in forward passes that are too large for it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.training_proxy import RUN, TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.serve_trainer import trainer_process
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import GRPO, InProcess, settings, trajectory, turn
from trainer.batching.grouping import Batch
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import linearise
from trainer.config import BatchSettings
from trainer.errors import MemoryExhausted, RanksStartAgain, TrainerError
from trainer.models.state_dict import read_weights
from trainer.parallel.mesh import Ranks
from trainer.runtime.memory import MicroBatchMemory
from trainer.runtime.restarts import Restarts, SmallerBound

IN_ONE_STEP = dataclasses.replace(GRPO, mini_batches=1)


def refuse(trainer: InProcess, most: int, *, after: int = 0) -> list[int]:
    """Make forward passes fail for lack of memory: those of more than `most` tokens, after this many passes."""
    forward, seen = trainer.model.forward, list[int]()

    def bounded(input_ids_BT: torch.Tensor, *others: Any) -> Any:
        seen.append(input_ids_BT.numel())
        if input_ids_BT.numel() > most and len(seen) > after:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nand much more about it")
        return forward(input_ids_BT, *others)

    setattr(trainer.model, "forward", bounded)  # noqa: B010 - of this one alone
    return seen


@pytest.mark.parametrize(("preset", "after"), [("grpo", 0), ("ppo", 0), ("ppo", 3)])
def test_a_step_that_does_not_fit_is_made_in_smaller_parts_with_the_same_gradient(
    start: Start, tiny_model: Path, tmp_path: Path, preset: str, after: int
) -> None:
    """This holds even if some of its optimiser steps were already made. A size that failed once is not tried
    again."""
    weights, proxies = [], []
    most = 10**6
    for name in ("enough", "little"):
        proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
        configured = settings(tmp_path / name, algorithm={"preset": preset}, optimizer={"eps": 1e-4})
        trainer = start(proxy, configured)
        trainer.loop.resume()
        seen = refuse(trainer, most, after=after)
        while proxy.version < 2:
            trainer.loop.step()
        if name == "enough":
            most = max(seen) * 3 // 5
        weights.append(trainer.weights())
        proxies.append(proxy)
    for tensor, name in ((tensor, name) for name, tensor in weights[0].items()):
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-6, rtol=1e-5)
    first, second = (commit.step.metrics["oom_splits"] for commit in proxies[1].commits)
    assert first >= 1
    assert second == 0
    assert seen[-1] <= most
    assert [commit.step.metrics["oom_splits"] for commit in proxies[0].commits] == [0, 0]
    assert set(proxies[1].consumed.values()) == {1}
    assert proxies[1].consumed.keys() == {
        audit.session_id for commit in proxies[1].commits for audit in commit.step.audit
    }


def test_a_sequence_that_does_not_fit_alone_ends_the_trainer_with_advice(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    refuse(trainer, 4)
    with pytest.raises(MemoryExhausted, match=r"tokens that cannot be divided do not fit.*activation_checkpointing"):
        trainer.loop.run()
    assert proxy.commits == []


def second_of_two(directory: Path | None) -> tuple[MicroBatchMemory, Callable[[int], TrainerError], int]:
    """Return the second rank's error if memory runs out in a step from a version, and its largest micro-batch."""
    members = [trajectory(turn([4 + index] * 5), reward=float(index)) for index in range(8)]
    batch = Batch(trajectories=tuple(members), groups=(0,) * 8, base_version=0)
    sequences = linearise(members)
    restarts = None if directory is None else Restarts(directory)
    memory = MicroBatchMemory(BatchSettings(), Ranks(1, 2, torch.device("cpu"), None), restarts, RUN)
    packed = mini_batches(batch, [(1.0,)] * 8, sequences, memory.settings, IN_ONE_STEP)
    largest = max(part.input_ids_BT.numel() for part in packed[0].micro_batches)
    return memory, lambda version: memory.after_refusal(packed, sequences, version, "Tried"), largest


def test_a_rank_that_would_not_be_restarted_names_the_setting_to_change() -> None:
    memory, refused, largest = second_of_two(None)
    found = refused(0)
    assert isinstance(found, MemoryExhausted)
    assert f"rank 1 of 2 is out of memory with micro-batches of {largest} tokens" in str(found)
    assert f"set trainer.batch.max_tokens_per_microbatch to {largest // 2} or less" in str(found)
    assert "or start the ranks by `base-rl train --nproc 2`" in str(found)
    assert memory.settings == BatchSettings()


def test_ranks_are_restarted_once_per_step_with_the_bound_of_the_first_failure(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path)
    assert not restarts.grant_request()
    memory, refused, largest = second_of_two(tmp_path)
    assert (memory.take_splits(), restarts.granted_bound(RUN)) == (0, None)
    assert isinstance(refused(3), RanksStartAgain)
    restarts.request(SmallerBound(run=RUN, version=3, max_tokens_per_microbatch=1))  # a peer, later
    assert restarts.grant_request()
    assert not restarts.grant_request()

    memory, refused, halved = second_of_two(tmp_path)
    assert memory.settings.max_tokens_per_microbatch == largest // 2 >= halved
    assert [memory.take_splits() for _ in range(2)] == [1, 0]
    found = refused(3)
    assert isinstance(found, MemoryExhausted)
    assert "out of memory again" in str(found)
    assert not restarts.grant_request()
    assert isinstance(refused(4), RanksStartAgain), "another step"
    assert restarts.grant_request()
    assert second_of_two(tmp_path)[0].settings.max_tokens_per_microbatch == max(8, halved // 2)
    assert len(list(tmp_path.iterdir())) == 1


@contextmanager
def launched(url: str, weights: Path, log: Path, most: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start two ranks by the launcher; the second runs out of memory in forward passes of more tokens."""
    program = (
        "import sys; from trainer.launch.local import main; "
        "sys.exit(main(sys.argv[1:], 'tests.trainer.out_of_memory'))"
    )
    values = ("packing=padded", "max_tokens_per_microbatch=50", "trajectories=20")
    options = [word for value in values for word in ("--set", f"batch.{value}")]
    launcher = (sys.executable, "-c", program, "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOST_TOKENS", str(most))
        with trainer_process(url, weights, log, *options, launcher=launcher) as process:
            yield process


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_two_restarted_ranks_continue_with_smaller_micro_batches(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy, log = TrainingProxy(base_model=str(tiny_model), source=random_groups()), tmp_path / "log"
    with proxy.serve() as url, launched(url, tmp_path / "two", log, 40) as process:
        proxy.wait_for(lambda: len(proxy.commits) >= 2 or process.poll() is not None, 240)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    said = log.read_text()
    (bound,) = {int(found) for found in re.findall(r"all start again, with (\d+) at the most", said)}
    assert f'"most_tokens": {bound}' in said
    assert [commit.step.metrics["oom_splits"] for commit in proxy.commits[:2]] == [1, 0]
    assert set(proxy.consumed.values()) == {1}

    undisturbed = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    batch = {"packing": "padded", "max_tokens_per_microbatch": bound, "trajectories": 20}
    trainer = start(undisturbed, settings(tmp_path / "one", batch=batch))
    trainer.loop.resume()
    for commit in proxy.commits[:2]:
        trainer.loop.step()
        found = read_weights(Path(commit.weights.uri))
        for name, weight in trainer.weights().items():
            torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0.0)
