from __future__ import annotations

from pathlib import Path

from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.archon.steps import compare, settings_of, two_updates
from tests.trainer.tiny import ALONE


def test_a_learner_makes_the_same_steps_on_either_backend(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3")
    found, wanted = (two_updates(tmp_path, settings_of(backend=each), ALONE) for each in ("archon", "fsdp"))
    assert found is not None
    assert wanted is not None
    assert any((found["weights"][name] != weight).any() for name, weight in wanted["weights"].items())
    compare(found, wanted)
