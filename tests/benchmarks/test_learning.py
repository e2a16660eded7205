from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning import __main__ as bench
from benchmarks.learning import report
from benchmarks.learning.__main__ import REWARDED, chosen, result_of
from benchmarks.learning.journal import Journal
from benchmarks.learning.plot import draw
from benchmarks.learning.run import Curve, Run
from benchmarks.learning.tasks import GROUPS, MEMBERS, TASKS
from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import ClaimId
from proxy.contract.trajectory import Trajectory
from trainer.algorithm.presets import PRESETS, resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, TrainerSettings
from trainer.loading import load_reference, load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner


@pytest.mark.parametrize("name", list(TASKS))
def test_attempts_have_the_policys_log_probabilities(name: str, tmp_path: Path) -> None:
    """The trainer computes the recorded log-probabilities, turn by turn: the paths are the prompts."""
    task, alone = TASKS[name](), Ranks(0, 1, torch.device("cpu"), None)
    base = task.prepare(tmp_path, 0)
    actor: Any = load_reference(base, TrainerSettings(), alone).inner
    groups, scores = task.attempt(actor, random.Random(0), torch.Generator().manual_seed(0), 0)
    members = [one for group in groups for one in group.trajectories]
    assert len(members) == len(scores) == GROUPS * MEMBERS
    assert max(len(one.turns) for one in members) > 1
    assert set(scores) <= {count / 3 for count in range(4)}
    assert len(set(scores)) > 1
    if name == "live":
        check_live(members, scores)
        assert {(group.id, len(group.trajectories)) for group in groups} == {(None, 1)}
    else:
        assert [len(group.trajectories) for group in groups] == [MEMBERS] * GROUPS
        assert [one.reward for one in members] == scores
    algorithm = resolve(AlgorithmSettings())
    claimed = ClaimedBatch(claim_id=ClaimId("c"), lease_expires_at=0.0, base_version=0, groups=tuple(groups))
    model = load_trained(base, TrainerSettings(), alone)
    prepared = prepare(claimed, 0, BatchSettings(), algorithm, RunningMeans.fresh(0.9), model.vocabulary)
    outcome = Learner(model, algorithm, OptimizerSettings(), alone).update(
        prepared.packed(BatchSettings(), algorithm)
    )
    assert outcome.tokens is not None
    assert (outcome.tokens.logprobs_N - outcome.tokens.behaviour_N).abs().max() < 1e-3


def check_live(members: list[Trajectory], scores: list[float]) -> None:
    """Check that sessions and turns are marked from 0 to 100, some both, and that the mark of a session is its
    score."""
    turns = [turn for one in members for turn in one.turns]
    kinds = Counter((one.reward is not None, sum(turn.reward is not None for turn in one.turns)) for one in members)
    assert {by_session for by_session, _ in kinds} == {True, False}
    assert min(kinds[True, 0], kinds[True, 1]) > 0
    assert all(turn.reward is not None for one in members if one.reward is None for turn in one.turns)
    assert {turn.reward for turn in turns} == {None, 0.0, 50.0, 100.0}
    for one, score in zip(members, scores, strict=True):
        assert one.reward in (None, 100.0 * score)
        assert one.turns[-1].reward in (None, 100.0 * score)


def test_the_report_names_the_worst_seed() -> None:
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
    for task in TASKS:
        assert result["grpo"]["staleness_4"][task]["steps_to_090"] == [7, None, 9]
    assert report.page_rows(result, "lock") == [["`grpo`", "7, –, 9", "0.90", "7, –, 9", "0.90"]]
    assert [(target.measured, target.reached) for target in report.judged(result)] == [(0.5, False)] * len(TASKS)
    assert "NOT REACHED  lock, grpo, staleness_0: 0.50" in report.shown(result)
    assert "| `grpo` | 7, –, 9 | 0.90 | 7, –, 9 | 0.90 |" in report.page(result)
    assert "The lowest final reward at staleness 0 and 2 is 0.50" in report.page(result)


def test_a_partial_measurement_reports_its_results() -> None:
    curve = Curve(rewards=(0.1, 0.9), steps_to_090=7, final=0.9)
    found = {Run(task="live", preset="grpo", seed=1, staleness=2): curve}
    result = result_of(found)
    assert result == {
        "grpo": {"staleness_2": {"live": {"steps_to_090": [7], "final": [0.9], "rewards": [[0.1, 0.9]]}}}
    }
    assert [target.what for target in report.judged(result)] == ["live, grpo, staleness_2"]
    assert report.page_rows(result, "calculator") == []


def test_partial_measurements_form_the_whole() -> None:
    parts = [chosen([task], [preset]) for task in TASKS for preset in REWARDED]
    assert {run for part in parts for run in part} == set(chosen())
    assert len(chosen()) == len(TASKS) * len(REWARDED) * 3 * 3


def test_the_result_is_written_by_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "RESULT", tmp_path / "learning.json")
    monkeypatch.setattr("benchmarks.learning.plot.draw", lambda result: None)
    journal = Journal(tmp_path / "journal.jsonl")
    *others, last = chosen()
    curve = Curve(rewards=(0.1, 0.9), steps_to_090=7, final=0.9, seconds=2.0)
    # One write: this journal of many lines is read only once here.
    monkeypatch.setattr(Journal, "read", lambda _: dict.fromkeys(others, curve))
    bench.publish_if_whole(journal)
    assert not (tmp_path / "learning.json").exists()
    monkeypatch.setattr(Journal, "read", lambda _: dict.fromkeys([*others, last], curve))
    bench.publish_if_whole(journal)
    written = json.loads((tmp_path / "learning.json").read_text())
    assert set(REWARDED) < set(written)
    assert written["seconds_of_a_core"] == dict.fromkeys(TASKS, 2.0)


def write_many(path: Path, seed: int) -> None:
    curve = Curve(rewards=(0.125,) * 2000, steps_to_090=None, final=1.0)  # longer than one write
    for staleness in range(5):
        Journal(path).add(Run(task="lock", preset="grpo", seed=seed, staleness=staleness), curve)


def test_several_processes_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with ThreadPoolExecutor(3) as pool:  # each opens the file separately, as a process would
        list(pool.map(lambda seed: write_many(path, seed), range(3)))
    assert len(Journal(path).read()) == 15


def test_every_preset_that_learns_from_rewards_is_measured() -> None:
    assert set(PRESETS) - set(REWARDED) == {"distillation"}


def test_an_interrupted_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        preset: {f"staleness_{versions}": {**figures, **dict.fromkeys(TASKS, figures)} for versions in (0, 2, 4)}
        for preset in PRESETS
    }
    for directory in (tmp_path / "a", tmp_path / "b"):
        draw(result, directory)
    drawn = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert drawn == sorted(f"learning-{task}.svg" for task in TASKS)
    for name in drawn:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        text = (tmp_path / "a" / name).read_text()
        assert all(f">{preset}<" in text for preset in PRESETS)
