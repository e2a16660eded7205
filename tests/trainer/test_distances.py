from __future__ import annotations

import itertools
import re
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor

from proxy.contract.trajectory import TrajectoryGroup
from tests.docs.markdown import ROOT, rows, sections
from tests.trainer.preset_references import ONE_STEP, REFERENCES, batch_of, gradient_of
from trainer.__main__ import main
from trainer.algorithm.presets import PRESETS
from trainer.distances import as_for_the_batch, common_batch, distances, gradient, gradients, norms, tables
from trainer.distances_command import table

KNOWN = tables()


@cache
def found() -> dict[str, Tensor]:
    return gradients()


def grouped(temperature: float = 1.0) -> tuple[TrajectoryGroup, ...]:
    """Return the groups of the common batch without rewards of turns."""
    return tuple(
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(
                    each,
                    turns=tuple(
                        msgspec.structs.replace(turn, reward=None, temperature=temperature) for turn in each.turns
                    ),
                )
                for each in group.trajectories
            ),
        )
        for group in common_batch(KNOWN)
        if group.id is not None
    )


def test_no_two_presets_have_the_same_gradient() -> None:
    apart = distances(found())
    assert list(apart) == list(PRESETS)
    assert min(norms(found()).values()) > 0
    for one, two in itertools.combinations(PRESETS, 2):
        assert apart[one][two] > 1e-3, f"{one} and {two}"
        assert apart[one][two] == apart[two][one]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_preset_equals_its_paper_from_rewards_to_gradient(preset: str) -> None:
    """Compare the gradient of each preset with the closed form of its paper in float64, at the preset's defaults, at
    a point where every part acts."""
    groups = grouped()
    batch = batch_of(KNOWN, groups)
    logits = KNOWN.start if preset in ONE_STEP else KNOWN.moved
    expected = gradient_of(batch, logits, REFERENCES[preset](batch))
    actual = gradient(as_for_the_batch(PRESETS[preset]), KNOWN, groups)
    assert expected.norm() > 0
    assert (actual - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "cispo", "sapo", "m2po"])
def test_the_characteristic_part_of_a_preset_acts_in_its_reference(preset: str) -> None:
    """Some tokens are clipped or left out and others are not, so the comparison above would detect either error."""
    batch = batch_of(KNOWN, grouped())
    coefficients = REFERENCES[preset](batch)
    unclipped = [abs(each) for each in coefficients if each]
    assert unclipped
    if preset not in {"cispo", "sapo"}:
        degenerate = sum(token.group == 2 for token in batch.tokens)
        assert sum(each == 0 for each in coefficients) > degenerate


def test_a_teacher_is_compared_with_the_policy_at_temperature_one() -> None:
    """A teacher compares with the policy at temperature 1, whatever temperature a token was sampled at; only the
    weight depends on that."""
    algorithm = PRESETS["distillation"]
    groups = grouped(temperature=0.5)
    batch = batch_of(KNOWN, groups)
    expected = gradient_of(batch, KNOWN.start, REFERENCES["distillation"](batch))
    assert (gradient(algorithm, KNOWN, groups) - expected).norm() < 1e-6 * expected.norm()


def test_the_gradient_is_the_same_in_every_process() -> None:
    assert torch.equal(gradients()["reinforce_pp"], found()["reinforce_pp"])


def test_the_documented_table_is_the_one_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures agree to the digits shown; the last may differ by one, because processors round differently."""
    assert main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == table(distances(found()), norms(found()))
    documented = rows(sections((ROOT / "docs" / "reference.md").read_text())["How far apart presets are"])
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]
    assert [line[0] for line in documented] == [line[0] for line in shown]
    for theirs, ours in zip(documented, shown, strict=True):
        assert [bool(cell) for cell in theirs] == [bool(cell) for cell in ours]
        for one, two in zip(theirs[1:], ours[1:], strict=True):
            digits = re.sub(r"^0\.0*|\.", "", one)
            assert not one or float(one) == pytest.approx(float(two), rel=1.01 * 10 ** (1 - max(2, len(digits))))


def test_the_command_prints_all_digits_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["distances"]["grpo"]["gspo"] == distances(found())["grpo"]["gspo"]
    assert printed["norms"]["grpo"] == 1
