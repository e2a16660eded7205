from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.baselines import RunningMean, baseline, scale
from trainer.config import Baseline, Scale

Cohorts = list[list[float]]

rewards = st.floats(-10, 10)
cohorts = st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=5)


def tensors(groups: Cohorts) -> tuple[torch.Tensor, torch.Tensor]:
    values = [value for group in groups for value in group]
    indices = [index for index, group in enumerate(groups) for _ in group]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(indices)


@given(groups=cohorts, running=rewards)
def test_group_baselines_against_plain_arithmetic(groups: Cohorts, running: float) -> None:
    rewards_N, groups_N = tensors(groups)
    mean = baseline(Baseline.GROUP_MEAN, rewards_N, groups_N, RunningMean(decay=0.9, value=running))
    others = baseline(Baseline.LEAVE_ONE_OUT, rewards_N, groups_N, RunningMean(decay=0.9, value=running))
    spread = scale(Scale.GROUP_STD, rewards_N, groups_N)
    position = 0
    for group in groups:
        for number, _ in enumerate(group):
            rest = group[:number] + group[number + 1 :]
            alone = not rest
            assert mean.baseline_N[position] == pytest.approx(running if alone else statistics.fmean(group), abs=1e-9)
            assert others.baseline_N[position] == pytest.approx(
                running if alone else statistics.fmean(rest), abs=1e-9
            )
            assert bool(mean.fallback_N[position]) is bool(others.fallback_N[position]) is alone
            wanted = 1.0 if alone else statistics.pstdev(group) + 1e-4
            assert spread[position] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            position += 1


@given(value=rewards, sizes=st.lists(st.integers(2, 6), min_size=1, max_size=4))
def test_equal_rewards_have_exactly_no_advantage(value: float, sizes: list[int]) -> None:
    rewards_N, groups_N = tensors([[value] * size for size in sizes])
    compared = baseline(Baseline.GROUP_MEAN, rewards_N, groups_N, RunningMean(decay=0.9))
    assert torch.equal(compared.baseline_N, rewards_N)


@given(values=st.lists(rewards, min_size=1, max_size=8), running=rewards)
def test_batch_baselines(values: list[float], running: float) -> None:
    rewards_N, groups_N = tensors([values])
    state = RunningMean(decay=0.9, value=running)
    compared = baseline(Baseline.BATCH_MEAN, rewards_N, groups_N, state)
    wanted = running if len(values) == 1 else statistics.fmean(values)
    assert compared.baseline_N.tolist() == pytest.approx([wanted] * len(values), abs=1e-9)
    spread = 1.0 if len(values) == 1 else statistics.pstdev(values) + 1e-4
    assert scale(Scale.BATCH_STD, rewards_N, groups_N).tolist() == pytest.approx([spread] * len(values), abs=1e-6)
    assert baseline(Baseline.RUNNING_MEAN, rewards_N, groups_N, state).baseline_N.tolist() == [running] * len(values)
    assert baseline(Baseline.NONE, rewards_N, groups_N, state).baseline_N.tolist() == [0.0] * len(values)


@given(batches=st.lists(st.lists(rewards, max_size=5), max_size=5))
def test_the_running_mean_weighs_trajectories_not_batches(batches: Cohorts) -> None:
    mean = RunningMean(decay=0.8)
    assert mean.baseline == 0.0
    value: float | None = None
    for batch in batches:
        mean = mean.updated(torch.tensor(batch, dtype=torch.float64))
        if batch:
            average = math.fsum(batch) / len(batch)
            kept = 0.8 ** len(batch)
            value = average if value is None else kept * value + (1 - kept) * average
    assert mean.value == (None if value is None else pytest.approx(value, abs=1e-9))


@pytest.mark.parametrize("kind", list(Baseline))
@pytest.mark.parametrize("unit", list(Scale))
def test_an_empty_batch_is_no_error(kind: Baseline, unit: Scale) -> None:
    rewards_N, groups_N = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    assert baseline(kind, rewards_N, groups_N, RunningMean(decay=0.9)).baseline_N.numel() == 0
    assert scale(unit, rewards_N, groups_N).numel() == 0
