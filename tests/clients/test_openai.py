"""OpenAI's own SDKs."""

from __future__ import annotations

import pytest

from tests.clients.following import Follower

pytestmark = [pytest.mark.clients]


def test_openai_python(follow: Follower) -> None:
    followed = follow("openai-python")
    assert "42" in followed.output
    assert followed.session.called == [("add", {"a": 17, "b": 25})]
    assert [turn["continuation"] for turn in followed.session.turns] == ["new", "exact"]
