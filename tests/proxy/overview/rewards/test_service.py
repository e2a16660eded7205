from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from proxy.contract.identifiers import new_reward_id
from proxy.database.tables import RewardRow, TurnRow
from proxy.errors import InvalidRequest, NotFound
from proxy.lifecycle.lifecycle import settle
from proxy.overview.filters import SessionFilter
from proxy.overview.rewards.views import RevisedTurn, RewardFilter, RewardItem
from proxy.overview.sessions.views import SessionItem
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.overview.site import Site, plan_of


async def say(site: Site, session: SessionItem, value: float, **values: Any) -> str:
    """Write the feedback of a trained session."""
    row: dict[str, Any] = {
        "id": new_reward_id(),
        "run_id": session.run_id,
        "session_id": session.id,
        "name": "reward",
    }
    row |= {"value": value, "source": "checker", "after_training": True, "created_at": NOW}

    def work(connection: Connection) -> None:
        connection.execute(insert(RewardRow).values(row | values))
        settle(connection, [session.id], now=NOW)

    await site.database.commit(work)
    return str((row | values)["id"])


async def consumed(site: Site, run_id: str, count: int = 1) -> tuple[SessionItem, ...]:
    """Sessions that were trained on a reward of 1."""
    wanted = SessionFilter(training="consumed", min_reward=1.0)
    return (await site.overview.sessions(run_id, wanted, limit=count)).sessions


async def everything(site: Site, run_id: str | None, wanted: RewardFilter, limit: int = 7) -> list[RewardItem]:
    found: list[RewardItem] = []
    cursor: str | None = None
    while True:
        page = await site.overview.ledger.page(run_id, wanted, cursor=cursor, limit=limit)
        found.extend(page.rewards)
        cursor = page.next_cursor
        if cursor is None:
            return found
        assert len(page.rewards) == limit


async def turns_of(site: Site, session_id: str) -> list[str]:
    statement = select(TurnRow.id).where(TurnRow.session_id == session_id).order_by(TurnRow.ordinal)
    return await site.database.read(lambda connection: list(connection.execute(statement).scalars()))


async def test_each_filter_finds_its_entries_and_all_of_them(site: Site, run_id: str) -> None:
    one, other = await consumed(site, run_id, 2)
    turn = (await turns_of(site, one.id))[0]
    late = await say(site, one, 0.0, created_at=NOW + 1)
    of_turn = await say(site, one, 0.5, turn_id=turn, name="style", created_at=NOW + 2)
    judged = await say(site, other, 0.75, source="judge", created_at=NOW + 3)
    by_id = {item.id: item for item in await everything(site, run_id, RewardFilter())}
    assert len(by_id) == 104
    assert [item.id for item in await everything(site, run_id, RewardFilter(), limit=3)] == list(by_id)
    for wanted, expected in (
        (RewardFilter(session=one.id), [of_turn, late, *_old(by_id, one.id)]),
        (RewardFilter(turn=turn), [of_turn]),
        (RewardFilter(name="style"), [of_turn]),
        (RewardFilter(source="judge"), [judged]),
        (RewardFilter(since=NOW + 2), [judged, of_turn]),
        (RewardFilter(after_training=True), [judged, of_turn, late]),
        (RewardFilter(after_training=True, name="reward", session=one.id), [late]),
        (RewardFilter(source="nobody"), []),
    ):
        assert [item.id for item in await everything(site, run_id, wanted, limit=2)] == expected, wanted
    before = await everything(site, run_id, RewardFilter(after_training=False))
    assert [item.id for item in before] == list(by_id)[3:]


def _old(by_id: dict[str, RewardItem], session_id: str) -> list[str]:
    return [item.id for item in by_id.values() if item.session_id == session_id and not item.after_training]


async def test_the_ledger_of_all_runs_is_in_one_order(site: Site, run_id: str) -> None:
    other_run = await add_run(site.database, name="other")
    for index in range(5):
        await add_session(site.database, other_run, now=NOW - 100 + 20 * index, reward=float(index))
    both = await everything(site, None, RewardFilter(), limit=10)
    assert len(both) == 106
    assert [item.created_at for item in both] == sorted((item.created_at for item in both), reverse=True)
    assert len(await everything(site, other_run, RewardFilter())) == 5


async def test_within_a_run_a_session_may_have_its_clients_name(site: Site, run_id: str) -> None:
    session = await add_session(site.database, run_id, now=NOW + 5, reward=0.5, external_id="attempt-1")
    (found,) = await everything(site, run_id, RewardFilter(session="attempt-1"))
    assert found.session_id == session
    (turn,) = await turns_of(site, session)
    other = (await consumed(site, run_id))[0]
    for wanted in (
        RewardFilter(session="attempt-2"),
        RewardFilter(turn="turn_none"),
        RewardFilter(session=other.id, turn=turn),
    ):
        with pytest.raises(NotFound):
            await site.overview.ledger.page(run_id, wanted)


async def test_revised_sessions_list_trained_and_later_rewards(site: Site, run_id: str) -> None:
    assert (await site.overview.ledger.revised(run_id)).sessions == ()
    first, second, third = await consumed(site, run_id, 3)
    assert first.consumed_by is not None
    said = await say(site, first, 0.0, created_at=NOW + 1, comment="the tests were wrong")
    turn = (await turns_of(site, second.id))[1]
    await say(site, second, 0.75, turn_id=turn, created_at=NOW + 2)
    await say(site, third, 1.0, created_at=NOW + 3)  # the same again
    page = await site.overview.ledger.revised(run_id, limit=1)
    assert page.next_cursor is not None
    rest = await site.overview.ledger.revised(run_id, cursor=page.next_cursor, limit=1)
    assert rest.next_cursor is None
    (of_turn,), (of_session,) = page.sessions, rest.sessions
    assert (of_session.session_id, of_session.version) == (first.id, first.consumed_by)
    assert (of_session.reward_then, of_session.reward_now, of_session.turns) == (1.0, 0.0, ())
    assert [(entry.id, entry.comment, entry.used_by) for entry in of_session.entries] == [
        (said, "the tests were wrong", None)
    ]
    assert of_session.trained_at < of_session.revised_at == NOW + 1
    assert (of_turn.session_id, of_turn.reward_then, of_turn.reward_now) == (second.id, 1.0, 1.0)
    assert of_turn.turns == (RevisedTurn(turn_id=turn, reward_then=None, reward_now=0.75),)
    assert (await site.overview.run(run_id)).revised_sessions == 2
    await say(site, first, 1.0, created_at=NOW + 4)
    assert [session.session_id for session in (await site.overview.ledger.revised(run_id)).sessions] == [second.id]
    view = await site.overview.session(first.id)
    assert view.trained is not None
    assert (view.trained.reward_then, view.trained.reward_now, view.trained.revised) == (1.0, 1.0, False)


async def test_invented_cursors_are_refused(site: Site, run_id: str) -> None:
    for cursor in ("x", "-1", "0x1p0~"):
        with pytest.raises(InvalidRequest):
            await site.overview.ledger.revised(run_id, cursor=cursor)
        with pytest.raises(InvalidRequest):
            await site.overview.ledger.page(None, RewardFilter(), cursor=cursor)


async def test_only_indexes_are_walked(site: Site, run_id: str) -> None:
    """Whatever the filter, SQLite uses an index for it."""
    if not str(site.database.url).startswith("sqlite"):
        pytest.skip("SQLite's plans")
    wanted = {
        "ix_rewards_run_id_name_created_at": RewardFilter(name="style"),
        "ix_rewards_run_id_source_created_at": RewardFilter(source="judge"),
        "ix_rewards_late": RewardFilter(after_training=True),
        "ix_rewards_run_id_created_at": RewardFilter(since=NOW),
    }
    for index, one in wanted.items():
        plan = await plan_of(site, partial(site.overview.ledger.page, run_id, one), "FROM rewards")
        assert index in plan, plan
        assert "TEMP B-TREE" not in plan, plan
    plan = await plan_of(site, lambda: site.overview.ledger.revised(run_id), "FROM sessions")
    assert "ix_sessions_revised" in plan, plan
