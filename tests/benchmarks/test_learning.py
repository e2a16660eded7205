from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning import report
from benchmarks.learning.__main__ import REWARDED, result_of
from benchmarks.learning.journal import Journal
from benchmarks.learning.plot import draw
from benchmarks.learning.run import Curve, Run
from benchmarks.learning.tasks import GROUPS, MEMBERS, TASKS
from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId
from trainer.algorithm.presets import PRESETS, resolve
from trainer.algorithm.running import RunningMeans
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
    rewards = {one.reward for group in groups for one in group.trajectories}
    assert rewards <= {count / 3 for count in range(4)}
    assert len(rewards) > 1
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
        Run(task=task, preset="grpo", seed=seed, staleness=staleness): Curve(
            rewards=(0.1, final), steps_to_090=steps, final=final
        )
        for task in TASKS
        for staleness in (0, 4)
        for seed, (final, steps) in enumerate([(0.95, 7), (0.5, None), (0.9, 9)])
    }
    result = {"machine": {}, **result_of(found)}
    assert result["grpo"]["staleness_4"]["steps_to_090"] == [7, None, 9]
    assert result["grpo"]["staleness_4"]["lock"]["steps_to_090"] == [7, None, 9]
    assert report.page_rows(result, "lock") == [["`grpo`", "7, –, 9", "0.90", "7, –, 9", "0.90"]]
    assert [(target.measured, target.reached) for target in report.judged(result)] == [(0.5, False)] * 2
    assert "NOT REACHED  lock, grpo, staleness_0: 0.50" in report.shown(result)


def test_every_preset_that_rewards_teach_is_measured() -> None:
    assert set(PRESETS) - set(REWARDED) == {"distillation"}


def test_a_measurement_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(task="lock", preset="grpo", seed=0, staleness=2)
    curve = Curve(rewards=(0.25, 1.0), steps_to_090=None, final=1.0)
    path = tmp_path / "there" / "journal.jsonl"
    assert Journal(path).read() == {}
    Journal(path).add(run, curve)
    with path.open("a") as file:
        file.write('{"code": "cut o')
    assert Journal(path).read() == {run: curve}
    other = Run(task="lock", preset="grpo", seed=1, staleness=2)
    Journal(path).add(other, curve)
    assert Journal(path).read() == {run: curve, other: curve}
    monkeypatch.setattr("benchmarks.learning.journal.code_digest", lambda root: "of other code")
    assert Journal(path).read() == {}


def test_the_curves_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    figures = {"steps_to_090": [1, None], "final": [0.9, 0.2], "rewards": [[0.1, 0.9], [0.1, 0.1, 0.2]]}
    result = {
        preset: {f"staleness_{versions}": {**figures, "lock": figures} for versions in (0, 2, 4)}
        for preset in PRESETS
    }
    for directory in (tmp_path / "a", tmp_path / "b"):
        draw(result, directory)
    drawn = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert drawn == ["learning-calculator.svg", "learning-lock.svg"]
    for name in drawn:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        text = (tmp_path / "a" / name).read_text()
        assert all(f">{preset}<" in text for preset in PRESETS)
