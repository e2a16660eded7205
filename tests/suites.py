"""The suites that `make test` leaves out, each a mark. One that is run alone need not import the tests of all others,
which takes half a minute: those are told by their text."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

SUITES = frozenset(
    {
        "archon",
        "browser",
        "clients",
        "end_to_end",
        "gpu",
        "helm",
        "images",
        "pages",
        "ranks",
        "ray",
        "sglang",
        "slurm",
        "tracking",
    }
)
ROOT = Path(__file__).parent


def may_have(path: Path, suite: str) -> bool:
    """Return whether a test file, a file in a folder, or a conftest.py above it contains `mark.` and the suite's
    name."""
    below = path.rglob("*.py") if path.is_dir() else [path]
    above = (folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT))
    return any(f"mark.{suite}" in _text(file) for file in [*below, *above])


def check(items: Iterable[pytest.Item]) -> None:
    """Raise UsageError for a test that no suite would run."""
    for path, suite in {(item.path, mark.name) for item in items for mark in item.iter_markers()}:
        if suite in SUITES and not may_have(path, suite):
            raise pytest.UsageError(
                f"{path}: it has tests of the suite {suite}, but neither it nor a conftest.py above says"
                f" mark.{suite}: -m {suite} would not find them"
            )


def keep_together(items: Iterable[pytest.Item], *, named: bool) -> None:
    """Tests for whose module something is made once run in one process, under pytest-xdist too, which otherwise makes
    it in each. With `named`, groups are part of the tests' ids, by which pytest-xdist knows them: it writes them to
    where pytest had its ids before 9.2."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares(item):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
        group = item.get_closest_marker("xdist_group")
        if named and group is not None:
            # pytest has no public way to change an item's id.
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


def _shares(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    # pytest's public interface names the fixtures of an item, but not their scopes.
    found = item._fixtureinfo.name2fixturedefs.values()
    return any(definitions[-1].scope == "module" for definitions in found)


@functools.cache
def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
