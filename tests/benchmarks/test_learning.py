from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning import report
from benchmarks.learning.__main__ import result_of
from benchmarks.learning.run import Curve, Run
from benchmarks.learning.tasks import GROUPS, MEMBERS, TASKS
from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId
from trainer.algorithm.advantages import RunningMeans
from trainer.algorithm.presets import resolve
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, TrainerSettings
from trainer.intake.preparation import prepare
from trainer.loading import load_reference, load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner


@pytest.mark.parametrize("name", list(TASKS))
def test_attempts_are_what_the_policy_said(name: str, tmp_path: Path) -> None:
    """The trainer finds the log-probabilities that were recorded, turn for turn: the paths are the prompts."""
    task, alone = TASKS[name](), Ranks(0, 1, torch.device("cpu"), None)
    base = task.prepare(tmp_path, 0)
    actor: Any = load_reference(base, TrainerSettings(), alone).inner
    groups = task.attempt(actor, random.Random(0), torch.Generator().manual_seed(0), 0)
    assert [len(group.trajectories) for group in groups] == [MEMBERS] * GROUPS
    assert max(len(one.turns) for group in groups for one in group.trajectories) > 1
    assert {one.reward for group in groups for one in group.trajectories} <= {0.0, 1.0}
    algorithm = resolve(AlgorithmSettings())
    claimed = ClaimedBatch(claim_id=ClaimId("c"), lease_expires_at=0.0, base_version=0, groups=tuple(groups))
    model = load_trained(base, TrainerSettings(), alone)
    prepared = prepare(claimed, 0, BatchSettings(), algorithm, RunningMeans.fresh(0.9), model.vocabulary)
    outcome = Learner(model, algorithm, OptimizerSettings(), alone).update(
        prepared.packed(BatchSettings(), algorithm)
    )
    assert outcome.tokens is not None
    assert (outcome.tokens.logprobs_N - outcome.tokens.behaviour_N).abs().max() < 1e-3


def test_the_report_tells_the_worst_seed() -> None:
    found = {
        Run(task="lock", preset="grpo", seed=seed, staleness=staleness): Curve(
            rewards=(0.1, final), steps_to_090=steps, final=final
        )
        for staleness in (0, 4)
        for seed, (final, steps) in enumerate([(0.95, 7), (0.5, None), (0.9, 9)])
    }
    result = result_of(found)
    assert result["lock"]["grpo"]["staleness_4"]["steps_to_090"] == [7, None, 9]
    assert report.page_rows(result, "lock") == [["`grpo`", "7, –, 9", "0.90", "7, –, 9", "0.90"]]
    (target,) = report.judged(result)
    assert (target.measured, target.reached) == (0.5, False)
    assert "NOT REACHED  lock, grpo, staleness_0: 0.50" in report.shown(result)
