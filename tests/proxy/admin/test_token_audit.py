from __future__ import annotations

import pytest

from proxy.admin.token_audit import Colouring, draw_audit
from proxy.overview.steps.views import AuditedTurn


def audited(session: str, *, texts: tuple[str, ...] | None = ("a", "b", "c")) -> AuditedTurn:
    return AuditedTurn(
        session_id=session,
        turn_id="turn_1",
        ordinal=1,
        output_ids=(1, 2, 3),
        texts=texts,
        logprobs=(-1.0, -1.0, -1.0),
        engine_logprobs=(-3.0, -1.0, -0.5),
        ratios=(7.4, 1.0, 0.6),
        advantages=(2.0, 0.0, -1.0),
        staleness=(0, 1, 2),
        clipped=(True, False, False),
    )


@pytest.mark.parametrize(
    ("by", "styles"),
    [
        (Colouring.RATIO, ["h8", "h0", "d4"]),
        (Colouring.ADVANTAGE, ["h8", "h0", "d4"]),
        (Colouring.GAP, ["h8", "h0", "h4"]),
    ],
)
def test_up_is_warm_down_is_cool_and_a_gap_has_no_direction(by: Colouring, styles: list[str]) -> None:
    (trajectory,) = draw_audit([audited("ses_1")], by)
    (turn,) = trajectory.turns
    assert [token.style for token in turn.tokens] == styles
    assert (turn.number, turn.clipped) == (2, 1)
    assert "ratio 7.4" in turn.tokens[0].title
    assert "clipped" in turn.tokens[0].title
    assert "2 versions old" in turn.tokens[2].title


def test_turns_stand_with_their_session_and_need_no_text() -> None:
    drawn = draw_audit([audited("ses_1"), audited("ses_1"), audited("ses_2", texts=None)], Colouring.RATIO)
    assert [(trajectory.session_id, len(trajectory.turns)) for trajectory in drawn] == [("ses_1", 2), ("ses_2", 1)]
    assert [token.text for token in drawn[1].turns[0].tokens] == ["·"] * 3
    assert draw_audit([], Colouring.RATIO) == ()
