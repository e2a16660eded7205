"""The metrics of a step that docs/reference.md explains."""

from __future__ import annotations

from tests.docs.markdown import ROOT, code, rows, sections


def documented_metrics() -> set[str]:
    """Return the names in the reference's table. `N` stands for a number of versions."""
    table = sections((ROOT / "docs" / "reference.md").read_text())["Step metrics"]
    return {code(cells[0])[0] for cells in rows(table)}


def name_in_docs(metric: str) -> str:
    """Return the name under which the table has the metric: `staleness_share_N` for `staleness_share_3`."""
    stem, _, last = metric.rpartition("_")
    return f"{stem}_N" if last.isdecimal() else metric
