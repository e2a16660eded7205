"""Test the sessions of `make bench-feedback`, and how it evaluates its measurements."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.feedback import report
from benchmarks.feedback.__main__ import RESULT
from benchmarks.feedback.judged import MEMBERS, Compared, FollowedUp
from benchmarks.feedback.plot import IMAGE, draw
from benchmarks.feedback.run import Commented, Curve, Kind, Run, figures
from benchmarks.learning.run import claim_of
from benchmarks.learning.tasks import CHECKPOINT
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import Prepared, prepare
from trainer.config import AlgorithmSettings, BatchSettings, TrainerSettings
from trainer.loading import load_reference
from trainer.parallel.mesh import Ranks


def attempted(kind: Kind) -> tuple[Prepared, list[float], int]:
    alone = Ranks(0, 1, torch.device("cpu"), None)
    model: Any = load_reference(CHECKPOINT, TrainerSettings(), alone)
    task = Commented(Run(kind=kind, seed=0, sessions=6), CHECKPOINT)
    groups, scores = task.attempt(model.inner, random.Random(0), torch.Generator().manual_seed(0), 0)
    algorithm = resolve(AlgorithmSettings(hindsight_coefficient=0.0 if kind == "numbers" else 1.0))
    ready = prepare(claim_of(groups, 0), 0, BatchSettings(), algorithm, RunningMeans.fresh(0.9), model.vocabulary)
    hinted = ready.hinted(BatchSettings(), algorithm)
    return ready, scores, sum(each.targets_N.numel() for each in hinted)


def test_every_answer_is_read_with_the_words_and_has_no_number() -> None:
    ready, _, hinted = attempted("words")
    members = ready.batch.trajectories
    assert (len(members), ready.dropped, ready.has_signal) == (6, (), True)
    assert {member.reward for member in members} == {None}
    assert hinted == sum(len(turn.output_ids) for member in members for turn in member.turns)


def test_numbers_come_without_words() -> None:
    ready, scores, hinted = attempted("numbers")
    members = ready.batch.trajectories
    assert [member.reward for member in members] == scores
    assert (hinted, [member.hints for member in members]) == (0, [()] * 6)


def test_steps_are_counted_to_the_first_good_batches() -> None:
    curve = Curve(rewards=(0.2, 0.5, 0.9, 0.9, 0.9, 0.9, 0.5))
    assert (curve.first, curve.steps_to_goal) == (0.2, 5)
    assert curve.last == pytest.approx(0.8)
    assert Curve(rewards=(0.2, 0.9, 0.9, 0.9)).steps_to_goal is None


def test_targets_are_of_every_seed() -> None:
    good, bad = Curve(rewards=(0.2, *[0.9] * 6)), Curve(rewards=(0.2, 0.9, *[0.1] * 5))
    result = {"words": figures([good, good]), "words_shuffled": figures([bad, bad]), "numbers": figures([good])}
    result |= {"relative": figures([good, good]), "follow_up": figures([good, good])}
    assert all(reached for _, reached in report.judged(result))
    assert report.table(result)[1] == [
        *("words of other sessions", "0.20, 0.20", "0.90, 0.90", "0.10, 0.10", "never, never")
    ]
    result["words"] = figures([good, bad])
    result["follow_up"] = figures([bad, good])
    assert [reached for _, reached in report.judged(result)] == [True, False, True, True, False]


def test_a_relative_judge_scores_groups_and_a_follow_up_scores_turns() -> None:
    alone = Ranks(0, 1, torch.device("cpu"), None)
    model: Any = load_reference(CHECKPOINT, TrainerSettings(), alone)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    generator = torch.Generator().manual_seed(0)
    compared = Compared(16, 0, tokenizer).attempt(model.inner, random.Random(0), generator, 0)
    assert [len(group.trajectories) for group in compared.groups] == [MEMBERS] * 4
    rewards = [member.reward for group in compared.groups for member in group.trajectories]
    # Four members have six comparisons, and each is won by one of the two.
    assert sum(reward or 0 for reward in rewards) == pytest.approx(4 * 6 / 3)
    followed = FollowedUp(16, 0, tokenizer).attempt(model.inner, random.Random(0), generator, 0)
    found = [
        (followed.scores[number], group.trajectories[0].turns[-1].reward)
        for number, group in enumerate(followed.groups)
    ]
    assert {reward for score, reward in found if score == 1} <= {1.0, None}
    assert {reward for score, reward in found if score == 0} <= {0.0, None}
    assert {reward for _, reward in found} >= {0.0, 1.0}


def test_the_picture_of_the_docs_is_that_of_the_result(tmp_path: Path) -> None:
    result = json.loads(RESULT.read_text())
    draw(result, tmp_path / "drawn.svg")
    again, docs = (texts_of(path) for path in (tmp_path / "drawn.svg", IMAGE))
    assert again == docs
    measured = set(report.NAMES) & set(result)
    assert {report.NAMES[kind] for kind in measured} <= set(docs), "a panel for each, and the line of numbers"
    draw({"numbers": result["numbers"], "words": result["words"]}, tmp_path / "fewer.svg")
    assert report.NAMES["relative"] not in texts_of(tmp_path / "fewer.svg")


def texts_of(path: Path) -> list[str | None]:
    return [node.text for node in ET.parse(path).iter() if node.tag.endswith("}text")]
