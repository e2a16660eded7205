"""A model that refuses what is too large for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import GRPO, InProcess, settings, trajectory, turn
from trainer.config import BatchSettings
from trainer.errors import MemoryExhausted
from trainer.intake.grouping import Batch
from trainer.intake.packing import mini_batches
from trainer.intake.sequences import linearise
from trainer.memory import MicroBatchMemory
from trainer.parallel.mesh import Ranks


def refuse(trainer: InProcess, most: int, *, after: int = 0) -> list[int]:
    """Its forward passes, by their tokens; beyond `most` of them, and after so many passes, memory is out."""
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
    """Also where some of its optimiser steps were made already. What did not fit once is not tried again."""
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


def test_a_sequence_that_does_not_fit_alone_is_the_end_and_says_what_to_do(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=random_groups())
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    refuse(trainer, 4)
    with pytest.raises(MemoryExhausted, match=r"tokens that cannot be divided do not fit.*activation_checkpointing"):
        trainer.loop.run()
    assert proxy.commits == []


def test_a_rank_of_several_says_what_to_set() -> None:
    members = [trajectory(turn([4] * 5), reward=float(index)) for index in range(8)]
    batch = Batch(trajectories=tuple(members), groups=(0,) * 8, base_version=0)
    sequences = linearise(members)
    packed = mini_batches(batch, [(1.0,)] * 8, sequences, BatchSettings(), GRPO)
    memory = MicroBatchMemory(BatchSettings(), Ranks(1, 2, torch.device("cpu"), None))
    found = memory.refused(packed, sequences, "Tried")
    assert isinstance(found, MemoryExhausted)
    largest = max(part.input_ids_BT.numel() for part in packed[0].micro_batches)
    assert f"rank 1 of 2 is out of memory with micro-batches of {largest} tokens" in str(found)
    assert "set trainer.batch.max_tokens_per_microbatch to" in str(found)
    assert memory.settings == BatchSettings()
