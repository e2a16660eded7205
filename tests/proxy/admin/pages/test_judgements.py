from __future__ import annotations

import re

import pytest
from sqlalchemy import Connection, insert

from proxy.database.tables import JudgementRow, RewardRow
from proxy.overview.filters import SessionFilter
from tests.fakes.run_history import NOW
from tests.proxy.admin.visiting import enter
from tests.proxy.overview.site import Site


@pytest.mark.rows_by_hand
async def test_a_session_shows_who_judged_it_and_why(site: Site, run_id: str) -> None:
    wanted = SessionFilter(training="consumed", min_reward=1.0)
    (session,) = (await site.overview.sessions(run_id, wanted, limit=1)).sessions
    about = {"run_id": run_id, "session_id": session.id, "created_at": NOW}
    reward = about | {"id": "rwd_1", "name": "taste", "source": "judge:taste", "after_training": False, "value": 0.75}
    judged = about | {"judge": "taste", "fingerprint": "0123456789abcdef", "is_cut": False}
    judged |= {"invalid_votes": 0, "prompt_tokens": 1, "completion_tokens": 1}

    def work(connection: Connection) -> None:
        connection.execute(insert(RewardRow).values(reward | {"comment": "right <b>and</b> short"}))
        scored = {
            "id": "jdg_1",
            "digest": "1",
            "reward_id": "rwd_1",
            "score": 0.75,
            "spread": 0.5,
            "votes": [0.5, 1.0],
        }
        failed: dict[str, object] = {"id": "jdg_2", "digest": "2", "error": "the answer has no score"}
        for row in (scored, failed, {"id": "jdg_3", "digest": "3"}):
            connection.execute(insert(JudgementRow).values(judged | row))

    await site.database.commit(work)
    await enter(site)
    page = (await site.client.get(f"/admin/sessions/{session.id}")).text
    shown = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "right &lt;b&gt;and&lt;/b&gt; short judge taste · 0123456789abcdef · 2 votes, spread 0.5" in shown
    assert "Judged without a score" in shown
    assert shown.count("taste 0123456789abcdef") == 2
    assert "the answer has no score" in shown
    assert "It cannot tell." in shown
