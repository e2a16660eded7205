from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth import access
from proxy.auth.access import KINDS, Principal, PrincipalKind, Right
from proxy.contract.identifiers import KeyId, RunId, SessionId
from proxy.errors import NotFound, PermissionDenied


class Owned(NamedTuple):
    id: str
    project_id: str


RUNS = tuple(Owned(f"run_{run}", f"prj_{project}") for project in "ab" for run in (f"{project}1", f"{project}2"))


def principal(kind: PrincipalKind, *, run: Owned | None = None, project: str | None = None) -> Principal:
    return Principal(
        kind=kind,
        key_id=KeyId("key_1"),
        run_id=None if run is None else RunId(run.id),
        session_id=SessionId("ses_1") if kind is PrincipalKind.SESSION else None,
        project_id=project,
    )


def scopes(kind: PrincipalKind) -> st.SearchStrategy[Principal]:
    """Every scope that a key of this kind can have."""
    of_run = st.sampled_from(RUNS).map(lambda run: principal(kind, run=run))
    of_project = st.sampled_from(["prj_a", "prj_b"]).map(lambda project: principal(kind, project=project))
    of_all = st.just(principal(kind))
    return {
        PrincipalKind.ADMIN: of_all,
        PrincipalKind.PROJECT: of_project,
        PrincipalKind.RUN: of_run,
        PrincipalKind.SESSION: of_run,
        PrincipalKind.TRAINER: of_run | of_project | of_all,
        PrincipalKind.VIEWER: of_project | of_all,
        PrincipalKind.REVIEWER: of_run | of_project,
    }[kind]


principals = st.sampled_from(PrincipalKind).flatmap(scopes)
runs = st.sampled_from(RUNS)


@given(principals, st.sampled_from(Right), runs)
def test_no_key_has_a_right_outside_its_scope(who: Principal, right: Right, run: Owned) -> None:
    if who.run_id not in (None, run.id) or who.project_id not in (None, run.project_id):
        assert not access.may(who, right, run)


@given(principals, st.sampled_from(Right), runs)
def test_the_answer_is_the_same_as_a_question_and_as_a_demand(who: Principal, right: Right, run: Owned) -> None:
    if not access.has_right(who, right):
        with pytest.raises(PermissionDenied):
            access.require_run(who, right, run, "the name")
    elif not access.covers(who, run):
        with pytest.raises(NotFound, match=r"^there is no run 'the name'$"):
            access.require_run(who, right, run, "the name")
    else:
        access.require_run(who, right, run, "the name")
        assert access.may(who, right, run)


@given(principals, runs)
def test_viewers_read_and_change_nothing(who: Principal, run: Owned) -> None:
    changing = set(Right) - {Right.LIST, Right.READ, Right.READ_SESSION, Right.READ_TRAINING, Right.SEE_PROJECT}
    changing -= {Right.WATCH, Right.OPEN_PAGE}
    if who.kind is PrincipalKind.VIEWER:
        assert not [right for right in changing if access.may(who, right, run)]
        assert access.may_see(who, run) == access.covers(who, run)


@given(principals, runs)
def test_reviewers_read_sessions_send_feedback_and_do_nothing_else(who: Principal, run: Owned) -> None:
    if who.kind is PrincipalKind.REVIEWER:
        rights = {right for right in Right if access.may(who, right, run)}
        wanted = {Right.READ_SESSION, Right.REWARD, Right.PREFER, Right.OPEN_PAGE}
        assert rights == (wanted if access.covers(who, run) else set())


@given(principals, st.sampled_from(PrincipalKind), st.sampled_from(["prj_a", "prj_b", None]))
def test_only_admin_keys_make_keys_that_outrank_a_project(
    who: Principal, kind: PrincipalKind, project: str | None
) -> None:
    manages = access.may_manage_key(who, kind, project_id=project)
    if who.kind is PrincipalKind.ADMIN:
        assert manages
    elif manages:
        assert who.kind is PrincipalKind.PROJECT
        assert project == who.project_id
        assert kind not in (PrincipalKind.ADMIN, PrincipalKind.PROJECT)


def test_every_right_is_somebodys_and_only_admins_administrate() -> None:
    assert set(KINDS) == set(Right)
    assert all(KINDS.values())
    assert [kind for kind in PrincipalKind if access.may_administrate(principal(kind))] == [PrincipalKind.ADMIN]


@pytest.mark.parametrize(("session", "covered"), [("ses_1", True), ("ses_2", False)])
def test_a_session_key_covers_its_own_session_only(session: str, covered: bool) -> None:
    who = principal(PrincipalKind.SESSION, run=RUNS[0])
    assert access.covers_session(who, RUNS[0], session) is covered
    assert not access.covers_session(who, RUNS[1], session)
