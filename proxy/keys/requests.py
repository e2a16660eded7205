"""Requests for keys, and who may make them: shared by the API and the admin page."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.access import Principal, PrincipalKind, Right, may_manage_key, require_right
from proxy.auth.service import BOOTSTRAP, Credentials, KeyChange, KeyView, NewKey
from proxy.errors import InvalidRequest, NotFound, PermissionDenied
from proxy.keys.scopes import Scope, checked_scope
from proxy.overview.endpoints import permitted_run_id
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import permitted_project_id
from proxy.projects.service import ProjectDirectory
from proxy.settings import GivenLimits

_LONGEST_GRACE = 30 * 86400.0
_LONGEST_LIFE = 3650 * 86400.0

Label = Annotated[str | None, Field(max_length=200)]
Lifetime = Annotated[float | None, Field(gt=0, le=_LONGEST_LIFE, allow_inf_nan=False)]


class NewRunKeyBody(BaseModel):
    """A new key for the run in the path. `label` is an older word for `name`."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["run", "trainer"] = "run"
    name: Label = None
    label: Label = None
    expires_in: Lifetime = None
    limits: GivenLimits | None = None

    @property
    def checked_name(self) -> str | None:
        """The name of the new key. Raise InvalidRequest for two different ones, and for the name of configured
        keys."""
        param = "label" if self.name is None else "name"
        name = self.label if self.name is None else self.name
        if self.label not in (None, name):
            raise InvalidRequest("`label` is an older word for `name`: give one of them", param="label")
        # The next restart revokes keys with this name that the configuration does not contain.
        if name == BOOTSTRAP:
            raise _reserved(param)
        return name


class NewKeyBody(NewRunKeyBody):
    """A new key. A `run` key needs a `run` (a name or an id), a `project` key a `project`; a `trainer` key needs
    either or `all_runs`, a `viewer` key a `project` or `all_runs`, a `reviewer` key a `run` or a
    `project`. It expires after `expires_in` seconds. `limits`
    bind the calls made with a run or project key."""

    kind: Literal["admin", "project", "run", "trainer", "viewer", "reviewer"]  # type: ignore[assignment]
    run: str | None = None
    project: str | None = None
    all_runs: bool = False


class ChangedKeyBody(BaseModel):
    """A change of a key. `expires_in` is in seconds from now, null for never; null for `limits` removes them."""

    model_config = ConfigDict(extra="forbid")

    name: Label = None
    expires_in: Lifetime = None
    limits: GivenLimits | None = None

    @property
    def change(self) -> KeyChange:
        """The change that the body asks for. Raise InvalidRequest for none, and for the name of configured keys."""
        given = self.model_fields_set
        if not given:
            raise InvalidRequest("give `name`, `expires_in` or `limits`", param="name")
        if self.name == BOOTSTRAP:
            raise _reserved("name")
        return KeyChange(
            name=self.name if "name" in given else msgspec.UNSET,
            expires_in=self.expires_in if "expires_in" in given else msgspec.UNSET,
            limits=(self.limits or GivenLimits()) if "limits" in given else msgspec.UNSET,
        )


class RotateBody(BaseModel):
    """The rotation of a key. The replaced key stays valid for `grace_seconds`."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[float, Field(ge=0, le=_LONGEST_GRACE, allow_inf_nan=False)] = 0.0


async def create_checked(
    body: NewKeyBody, who: Principal, overview: OverviewService, credentials: Credentials, projects: ProjectDirectory
) -> NewKey:
    """Create a key. Raise InvalidRequest, PermissionDenied, and NotFound for a scope that `who` does not have."""
    kind = PrincipalKind(body.kind)
    scope = checked_scope(kind, Scope(run=body.run, project=body.project, all_runs=body.all_runs))
    name = body.checked_name
    run_id = None if scope.run is None else await permitted_run_id(scope.run, who, overview, Right.CHANGE)
    project_id = None if scope.project is None else await permitted_project_id(scope.project, who, projects)
    within = project_id if run_id is None else (await overview.owner_of(run_id)).project_id
    _check_manages(who, kind, within)
    return await credentials.create(
        kind, run_id=run_id, project_id=project_id, label=name, expires_in=body.expires_in, limits=body.limits
    )


async def managed_key(key_id: str, who: Principal, overview: OverviewService, credentials: Credentials) -> KeyView:
    """Return the key. Raise PermissionDenied or NotFound unless `who` may change it."""
    require_right(who, Right.CHANGE)
    view = await credentials.find(key_id)
    if view is None:
        raise NotFound(f"there is no key {key_id!r}")
    project_id = view.project_id if view.run_id is None else (await overview.owner_of(view.run_id)).project_id
    if who.project_id not in (None, project_id):
        raise NotFound(f"there is no key {key_id!r}")
    _check_manages(who, view.kind, project_id)
    return view


def _check_manages(who: Principal, kind: PrincipalKind, project_id: str | None) -> None:
    if not may_manage_key(who, kind, project_id=project_id):
        raise PermissionDenied(
            f"a {who.kind.value} key manages the run, trainer, viewer and reviewer keys of its project: a"
            f" {kind.value} key like this needs an admin key"
        )


def _reserved(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"the {param} {BOOTSTRAP!r} is reserved for keys of the configuration: choose another", param=param
    )
