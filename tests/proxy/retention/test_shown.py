"""Erased and redacted sessions in the operating API and on the admin page."""

from __future__ import annotations

from sqlalchemy import update

from proxy.auth.service import PrincipalKind
from proxy.database.tables import TurnRow
from proxy.overview.filters import SessionFilter
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.runs.service import RunDirectory
from tests.fakes.run_history import NOW
from tests.proxy.conftest import run_id, site
from tests.proxy.overview.site import ORIGIN, Site

__all__ = ["run_id", "site"]


async def test_an_erased_session_is_shown_without_its_content(site: Site, run_id: str) -> None:
    (session,) = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions
    runs = RunDirectory(site.database, lambda: NOW)
    erasing = EraseService(site.database, runs, site.credentials, site.signals, lambda: NOW)
    report = await erasing.erase(ErasureTarget(session=session.id))
    assert [learnt.version for learnt in report.versions] == [session.consumed_by]
    admin = await site.key(PrincipalKind.ADMIN)
    view = (await site.client.get(f"/api/v1/sessions/{session.id}?tokens=true", headers=admin)).json()
    assert view["session"]["erased_reason"] == "requested"
    assert view["session"]["turn_count"] == len(view["turns"]) == session.turn_count
    assert all(turn["messages"] == [] and turn["tokens"]["output_ids"] == [] for turn in view["turns"])
    key = admin["authorization"].removeprefix("Bearer ")
    entered = await site.client.post("/admin/login", data={"key": key}, headers={"origin": ORIGIN})
    assert entered.status_code == 303
    page = await site.client.get(f"/admin/sessions/{session.id}")
    assert page.status_code == 200
    assert "its content was deleted" in page.text


async def test_a_turn_records_its_redacted_ranges(site: Site, run_id: str) -> None:
    (session,) = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions
    turn_id = (await site.overview.session(session.id)).turns[0].id
    await site.database.commit(
        lambda connection: connection.execute(update(TurnRow).where(TurnRow.id == turn_id).values(masked=[[1, 3]]))
    )
    admin = await site.key(PrincipalKind.ADMIN)
    turn = (await site.client.get(f"/api/v1/turns/{turn_id}", headers=admin)).json()
    assert turn["masked"] == [[1, 3]]
