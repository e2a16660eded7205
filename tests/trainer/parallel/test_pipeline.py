from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import PipelineSchedule
from trainer.parallel.axes import Axis
from trainer.parallel.pipeline import Pipeline

schedules = st.sampled_from(PipelineSchedule)


def pipeline(schedule: PipelineSchedule, size: int, rank: int = 0) -> Pipeline:
    return Pipeline(axis=Axis(size=size, rank=rank), schedule=schedule, device=torch.device("cpu"))


@given(schedules, st.integers(2, 6), st.integers(0, 40))
def test_each_stage_has_a_place_and_each_layer_a_stage(schedule: PipelineSchedule, size: int, more: int) -> None:
    pipelines = [pipeline(schedule, size, rank) for rank in range(size)]
    stages = pipelines[0].stages
    assert sorted(stage for each in pipelines for stage in each.mine) == list(range(stages))
    parts = pipelines[0].layers(stages + more)
    assert [layer for part in parts for layer in part] == list(range(stages + more))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    assert lengths[-1] >= 1


@pytest.mark.parametrize(
    ("schedule", "places"),
    [
        (PipelineSchedule.ONE_F_ONE_B, [0, 1, 2]),
        (PipelineSchedule.INTERLEAVED, [0, 1, 2, 0, 1, 2]),
        (PipelineSchedule.ZBV, [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_are_assigned_in_rounds_or_back_and_forth(schedule: PipelineSchedule, places: list[int]) -> None:
    each = pipeline(schedule, 3)
    assert [each.place(stage) for stage in range(each.stages)] == places
    assert each.last == places[-1]


@given(schedules, st.integers(2, 6), st.integers(1, 60))
def test_few_idle_micro_batches_round_up_their_number(schedule: PipelineSchedule, size: int, count: int) -> None:
    taken = pipeline(schedule, size).taken(count)
    assert count <= taken < count + 2 * size
    assert pipeline(schedule, size).taken(taken) == taken
