"""Follow every page that has commands, in order, as a reader would: with a model, an agent and a trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.blocks import PROGRAM, SHELL, Block, blocks_of, commands_of, example_pages, pages
from tests.docs.following import Reader

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

FOLLOWED = sorted(
    name
    for name, page in pages().items()
    if any(block.reason is None and block.language in (SHELL, PROGRAM) for block in blocks_of(page.read_text()))
)
LEAST_RISE = 0.3
"""Least increase of the mean reward from the first to the last 128 sessions with getting-started's configuration.
With the default configuration it does not increase."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_page_can_be_followed_as_written(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        for block in blocks_of(pages()[name].read_text()):
            reader.follow(block)
    if name == "docs/getting-started.md":
        found = re.search(r"^\{\n.*?^\}", reader.output, re.MULTILINE | re.DOTALL)
        assert found is not None, reader.output[-3000:]
        report = json.loads(found[0])
        assert report["failed_calls"] == 0
        assert report["last_mean"] - report["first_mean"] > LEAST_RISE, report


def blocks_of_example(name: str, *, by_make: bool) -> list[Block]:
    """Return the blocks of an example's README that are `make example` alone, or the others."""
    blocks = blocks_of(example_pages()[name].read_text())
    return [
        block
        for block in blocks
        if block.language == SHELL and (commands_of(block.code) == [f"make example NAME={name}"]) is by_make
    ]


IN_SHORT_FORM = {"extraction", "handoffs"}
"""One example with base-rl's own environment and one run, and one with an environment of its own and several runs."""
BY_HAND = [
    pytest.param(name, marks=() if name in IN_SHORT_FORM else pytest.mark.exhaustive)
    for name in example_pages()
    if any(block.reason is None for block in blocks_of_example(name, by_make=False))
]


@pytest.mark.parametrize("name", BY_HAND)
def test_an_example_can_be_run_by_hand_as_its_readme_says(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        for block in blocks_of_example(name, by_make=False):
            reader.follow(block)


# CI has a short run of every example as a step of its own.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in example_pages() if blocks_of_example(name, by_make=True)])
def test_an_example_can_be_run_by_make_as_its_readme_says(name: str, tmp_path: Path) -> None:
    (block,) = blocks_of_example(name, by_make=True)
    with Reader(tmp_path, {"SHORT": "1"}) as reader:  # some attempts are enough
        reader.follow(block)
    assert ", 0 failed calls" in reader.output
