"""TensorBoard's own reader finds the metrics that were sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from tests.trainer.observe.metrics.telling import about, tell
from trainer.observe.metrics.tensorboard import TensorboardSink


def read(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_steps_are_versions_and_a_restart_continues(tmp_path: Path) -> None:
    for versions in ((1, 2, 3), (4, 5)):
        tell(TensorboardSink(tmp_path), versions)
    assert [path.name for path in tmp_path.iterdir()] == [about(1).id]
    found = read(tmp_path / about(1).id, "reward_mean")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert [value for _, value in found] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_after_a_restart_from_an_earlier_version_later_points_are_void(tmp_path: Path) -> None:
    tell(TensorboardSink(tmp_path), (1, 2, 3, 4))
    tell(TensorboardSink(tmp_path), (3,), add=100.0)
    values = dict(read(tmp_path / about(1).id, "reward_mean"))
    assert values == {1: pytest.approx(0.1), 2: pytest.approx(0.2), 3: pytest.approx(100.3)}


def test_the_configuration_is_written(tmp_path: Path) -> None:
    tell(TensorboardSink(tmp_path), (1,))
    events = EventAccumulator(str(tmp_path / about(1).id))
    events.Reload()
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary"))
    assert '"learning_rate": 0.001' in text
