from __future__ import annotations

import pytest

from tests.trainer.tiny import GRPO
from trainer.algorithm.running import SESSION, RunningMeans
from trainer.errors import WeightsUnusable
from trainer.versions import means_of


def test_running_means_are_restored_from_states_of_all_versions() -> None:
    assert means_of(None, GRPO) == RunningMeans.fresh(0.99)
    older = means_of({"format": 2, "means": {"session": 0.25, "turn": None}}, GRPO)
    assert (older.baseline(None, SESSION), older.baseline("a", SESSION)) == (0.25, 0.25)
    assert means_of({"format": 2, "means": older.as_json()}, GRPO) == older
    with pytest.raises(WeightsUnusable, match="running means"):
        means_of({"format": 2, "means": {"run": 3}}, GRPO)
