from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.access import PrincipalKind
from proxy.errors import InvalidRequest
from proxy.keys.scopes import Scope, checked_scope

kinds = st.sampled_from([kind for kind in PrincipalKind if kind is not PrincipalKind.SESSION])
scopes = st.builds(
    Scope, run=st.sampled_from([None, "r"]), project=st.sampled_from([None, "p"]), all_runs=st.booleans()
)


@given(kinds, scopes)
def test_a_key_has_one_scope_or_is_refused_by_field(kind: PrincipalKind, scope: Scope) -> None:
    try:
        accepted = checked_scope(kind, scope)
    except InvalidRequest as error:
        assert error.param in ("run", "project", "all_runs")  # noqa: PT017  (whether it is refused is the question)
    else:
        assert accepted == scope
        assert len(scope.given) == (0 if kind is PrincipalKind.ADMIN else 1)


@pytest.mark.parametrize(
    ("kind", "scope", "param"),
    [
        (PrincipalKind.ADMIN, Scope(project="p"), "project"),
        (PrincipalKind.PROJECT, Scope(), "project"),
        (PrincipalKind.RUN, Scope(project="p"), "project"),
        (PrincipalKind.TRAINER, Scope(), "run"),
        (PrincipalKind.TRAINER, Scope(run="r", all_runs=True), "all_runs"),
        (PrincipalKind.VIEWER, Scope(run="r"), "run"),
        (PrincipalKind.REVIEWER, Scope(all_runs=True), "all_runs"),
        (PrincipalKind.REVIEWER, Scope(), "run"),
    ],
)
def test_the_wrong_or_missing_field_is_named(kind: PrincipalKind, scope: Scope, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked_scope(kind, scope)
    assert refused.value.param == param
