from __future__ import annotations

import pytest
from sqlalchemy import update

from proxy.database.tables import SessionRow, TurnRow
from proxy.overview.filters import SessionFilter
from proxy.overview.sessions.views import SessionItem
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.overview.site import Site, plan_of


async def test_sessions_come_page_by_page_each_once_newest_first(site: Site, run_id: str) -> None:
    await site.database.commit(
        lambda connection: connection.execute(
            update(SessionRow).values(created_at=NOW // 10 * 10)
        )  # equal times: the id decides
    )
    seen: list[SessionItem] = []
    cursor: str | None = None
    while True:
        page = await site.overview.sessions(run_id, SessionFilter(), cursor=cursor, limit=25)
        seen.extend(page.sessions)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(seen) == 106
    assert [item.id for item in seen] == sorted({item.id for item in seen}, reverse=True)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (SessionFilter(state="open"), 2),
        (SessionFilter(training="ready"), 3),
        (SessionFilter(group="task-0"), 8),
        (SessionFilter(group="nothing"), 0),
        (SessionFilter(attributed_by="conversation"), 1),
        (SessionFilter(training="ready", min_reward=0.5), 2),
        (SessionFilter(training="ready", max_reward=0.0), 1),
        (SessionFilter(training="ready", min_reward=0.1, max_reward=0.9), 0),
    ],
)
async def test_sessions_are_filtered(site: Site, run_id: str, wanted: SessionFilter, count: int) -> None:
    assert len((await site.overview.sessions(run_id, wanted, limit=200)).sessions) == count


async def test_a_name_finds_its_attempts_in_its_own_run(site: Site, run_id: str) -> None:
    other = await add_run(site.database, name="other")
    await add_session(site.database, other, now=NOW, reward=1.0, external_id="attempt-42")
    attempts = [
        await add_session(site.database, run_id, now=NOW + at, reward=at, external_id="attempt-42", attempt=at + 1)
        for at in range(3)
    ]
    await add_session(site.database, run_id, now=NOW, external_id="attempt-4")
    for wanted, found in (
        (SessionFilter(name="attempt-42"), attempts[::-1]),
        (SessionFilter(name="attempt-42", min_reward=1.0), attempts[:0:-1]),
        (SessionFilter(name="attempt-42", group="task-0"), []),
        (SessionFilter(name="attempt-42", state="open"), []),
        (SessionFilter(name="ATTEMPT-42"), []),
    ):
        page = await site.overview.sessions(run_id, wanted)
        assert ([item.id for item in page.sessions], page.next_cursor) == (found, None)
    first = await site.overview.sessions(run_id, SessionFilter(name="attempt-42"), limit=2)
    rest = await site.overview.sessions(run_id, SessionFilter(name="attempt-42"), cursor=first.next_cursor)
    assert [item.attempt for item in (*first.sessions, *rest.sessions)] == [3, 2, 1]


async def test_a_list_explains_each_session_as_the_session_itself_does(site: Site, run_id: str) -> None:
    greedy = await add_session(site.database, run_id, now=NOW, outcome="failed", training="excluded")
    await site.database.commit(
        lambda connection: connection.execute(
            update(TurnRow).where(TurnRow.session_id == greedy).values(state="failed")
        )
    )
    kept = await add_session(site.database, run_id, now=NOW, reward=1.0, attributed_by="import")
    listed = (await site.overview.sessions(run_id, SessionFilter(), limit=200)).sessions
    told = {item.id: item.explanation for item in listed}
    assert "the calls failed" in told[greedy]
    assert "the trainer takes it next" in told[kept], "only what was imported without training is held back"
    assert {item.training for item in listed} >= {"ready", "pending", "stale", "expired", "excluded", "consumed"}
    for item in listed[:30]:
        view = await site.overview.session(item.id)
        assert (view.trainability.explanation, view.session) == (item.explanation, item)


async def test_a_filtered_list_is_searched_bit_by_bit(
    site: Site, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page reads more than a bounded number of sessions, and no match is missed."""
    wanted = SessionFilter(training="expired")
    (expected,) = (await site.overview.sessions(run_id, wanted)).sessions
    monkeypatch.setattr("proxy.overview.sessions.repository.SEARCHED", 7)
    found: list[str] = []
    pages, cursor = 0, None
    while True:
        page = await site.overview.sessions(run_id, wanted, cursor=cursor)
        found += [session.id for session in page.sessions]
        pages, cursor = pages + 1, page.next_cursor
        if cursor is None:
            break
    assert found == [expected.id]
    assert pages == -(-106 // 7)
    open_ones = await site.overview.sessions(run_id, SessionFilter(state="open"))
    assert open_ones.next_cursor is None, "an index has them"


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (SessionFilter(), "ix_sessions_run_id_created_at"),
        (SessionFilter(state="open"), "uq_sessions_open_name"),
        (SessionFilter(group="task-0"), "ix_sessions_group_id_training_ended_at"),
        (SessionFilter(name="attempt-42"), "ix_sessions_run_id_external_id_attempt"),
        (SessionFilter(min_reward=0.5), "ix_sessions_run_id_created_at"),
    ],
)
async def test_no_list_walks_all_sessions(site: Site, run_id: str, wanted: SessionFilter, index: str) -> None:
    if not str(site.database.url).startswith("sqlite"):
        pytest.skip("SQLite's plans")
    plan = await plan_of(site, lambda: site.overview.sessions(run_id, wanted), "FROM sessions")
    walked = [line for line in plan.splitlines() if "sessions" in line]
    assert index in plan, plan
    assert all("(id=?)" in line or index in line for line in walked), plan


async def test_a_session_tells_its_turns_its_reward_and_the_step_that_took_it(site: Site, run_id: str) -> None:
    (item,) = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions
    view = await site.overview.session(item.id)
    assert view.run == "calculator"
    assert [turn.ordinal for turn in view.turns] == [0, 1, 2]
    assert view.turns[0].answer is not None
    assert view.turns[0].answer["tool_calls"][0]["function"]["name"] == "add"
    assert view.turns[1].messages[0]["role"] == "tool"
    assert view.turns[0].tokens is None
    assert view.trained is not None
    assert (view.trained.version, view.trained.reward_then, view.trained.revised) == (6, item.reward, False)
    assert view.rewards[0].used_by == 6
    assert "version 6" in view.trainability.explanation


async def test_tokens_come_where_asked_for_with_their_texts(site: Site, run_id: str) -> None:
    (item,) = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions
    turn = (await site.overview.session(item.id, with_tokens=True)).turns[2]
    assert turn.tokens is not None
    assert turn.tokens.output_texts is not None
    assert turn.answer is not None
    assert "".join(turn.tokens.output_texts) == turn.answer["content"]
    assert len(turn.tokens.output_ids) == len(turn.tokens.output_logprobs) == turn.output_tokens
    assert turn == await site.overview.turn(turn.id, with_tokens=True)
