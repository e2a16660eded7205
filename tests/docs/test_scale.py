"""docs/scale.md says what the planner computes, and what was measured."""

from __future__ import annotations

import json

from benchmarks.plan_table import table
from benchmarks.scale.partitions import KINDS
from tests.docs.markdown import ROOT, rows

PAGE = (ROOT / "docs" / "scale.md").read_text()


def test_the_table_of_memory_is_the_planners() -> None:
    assert table() in PAGE


def test_the_table_of_partitions_is_the_benchmarks() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "partitions.json").read_text())
    _, _, begins = PAGE.partition("### Turns in partitions")
    text, _, _ = begins.partition("### ")
    times = measured["time_partitioned_vs_plain"]
    assert [row[1] for row in rows(text)] == [str(times[kind]) for kind in KINDS]
    erased = measured["erasing_a_month"]
    assert f"{measured['turns']:,} turns" in text
    assert f"{erased['turns']:,} turns" in text
    assert f"takes {erased['seconds_by_updates_vs_drop']} times as long" in text
