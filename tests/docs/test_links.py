"""Check that links resolve, and that no tracked file refers to the machine on which it was written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import EXAMPLE_PAGES
from tests.docs.markdown import ROOT, anchors, links

PLACES_ELSEWHERE = ("/" + "work/", "../" + "shared")


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")), *EXAMPLE_PAGES]
    return [page for page in found if page.exists()]


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert not broken


def test_no_tracked_file_refers_to_a_path_outside_the_repository() -> None:
    named = [
        f"{file.relative_to(ROOT)}: {place}"
        for file in tracked()
        if file.is_file()
        for place in PLACES_ELSEWHERE
        if place.encode() in file.read_bytes()
    ]
    assert not named
