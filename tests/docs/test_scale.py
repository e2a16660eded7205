"""docs/scale.md says what the planner computes."""

from __future__ import annotations

from benchmarks.plan_table import table
from tests.docs.markdown import ROOT


def test_the_table_of_memory_is_the_planners() -> None:
    assert table() in (ROOT / "docs" / "scale.md").read_text()
