"""Every page that has commands is followed, in order, as a reader would: with a model, an agent and a trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.blocks import PROGRAM, SHELL, blocks_of, pages
from tests.docs.following import Reader

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

FOLLOWED = sorted(
    name
    for name, page in pages().items()
    if any(block.reason is None and block.language in (SHELL, PROGRAM) for block in blocks_of(page.read_text()))
)
LEAST_RISE = 0.3
"""Of the mean reward of the first to that of the last 128 sessions, with getting-started's configuration. With the
defaults there is none."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_page_works_as_it_is_written(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        for block in blocks_of(pages()[name].read_text()):
            reader.follow(block)
    if name == "docs/getting-started.md":
        found = re.search(r"^\{\n.*?^\}", reader.output, re.MULTILINE | re.DOTALL)
        assert found is not None, reader.output[-3000:]
        report = json.loads(found[0])
        assert report["failed_calls"] == 0
        assert report["last_mean"] - report["first_mean"] > LEAST_RISE, report
