"""llm-comply, a tester of APIs, in its three formats."""

from __future__ import annotations

import re

import pytest

from tests.clients.following import Follower

pytestmark = [pytest.mark.clients]

_RESULTS = re.compile(r"Results: (\d+)/(\d+) passed(.*)")


def test_nothing_fails(follow: Follower) -> None:
    followed = follow("llm-comply")
    results = _RESULTS.findall(followed.output)
    assert len(results) == 3, followed.output
    assert "\u274c" not in followed.output, followed.output
    assert all("failed" not in rest for _, _, rest in results), results
    assert [int(passed) for passed, _, _ in results] == [12, 8, 8], followed.output
