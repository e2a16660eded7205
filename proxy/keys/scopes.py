"""The scopes that a new key of each kind may have. Pure."""

from __future__ import annotations

import msgspec

from proxy.auth.access import PrincipalKind
from proxy.errors import InvalidRequest


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The scope that a request asks for: a run, a project (each a name or an id), or all runs."""

    run: str | None = None
    project: str | None = None
    all_runs: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that the request has."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) not in (None, False))


_CHOICES = {
    PrincipalKind.ADMIN: (),
    PrincipalKind.PROJECT: ("project",),
    PrincipalKind.RUN: ("run",),
    PrincipalKind.TRAINER: ("run", "project", "all_runs"),
    PrincipalKind.VIEWER: ("project", "all_runs"),
    PrincipalKind.REVIEWER: ("run", "project"),
}


def checked_scope(kind: PrincipalKind, scope: Scope) -> Scope:
    """Return the scope if a key of this kind may have it. Raise InvalidRequest for a scope that is missing, that does
    not fit the kind, or for several at once."""
    choices = _CHOICES[kind]
    wrong = next((name for name in scope.given if name not in choices), None)
    if not choices and wrong is not None:
        raise InvalidRequest(f"an {kind.value} key is for all runs: omit `{wrong}`", param=wrong)
    wanted = " or ".join(f"`{name}`" for name in choices)
    if wrong is not None:
        raise InvalidRequest(f"a {kind.value} key cannot be for `{wrong}`: give {wanted}", param=wrong)
    if choices and len(scope.given) != 1:
        what = {"run": "a run", "project": "a project"}.get(choices[0], "a scope")
        only = " alone" if len(scope.given) > 1 else ""
        param = scope.given[1] if only else choices[0]
        raise InvalidRequest(f"a {kind.value} key needs {what}: give {wanted}{only}", param=param)
    return scope
