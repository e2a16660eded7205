"""Claude Code, headless."""

from __future__ import annotations

import pytest

from tests.clients.following import Follower

pytestmark = [pytest.mark.clients]


def test_claude_code(follow: Follower) -> None:
    followed = follow("claude-code")
    assert "The sum is 42." in followed.output
    session = followed.session
    ((tool, arguments),) = session.called
    assert (tool, arguments["command"]) == ("Bash", "echo $((17 + 25))")
    assert [turn["continuation"] for turn in session.turns] == ["new", "exact"]
    assert [turn["attributed_by"] for turn in session.turns] == ["agent_header"] * 2
