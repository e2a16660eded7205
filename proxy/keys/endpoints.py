"""API keys over HTTP: an admin key manages all, the key of a project those of the project's runs and people. Only the
response that creates a key contains its text.

GET    /api/v1/keys                      {"keys": [KeyView…], "next_cursor"}, newest first
GET    /api/v1/keys/self                 KeyView of the request's key; for every kind
POST   /api/v1/keys                      NewKeyBody → 201 {"id", "key", "kind", …}
GET    /api/v1/keys/{id}                 KeyView
PATCH  /api/v1/keys/{id}                 ChangedKeyBody → KeyView
POST   /api/v1/keys/{id}/rotate          {"grace_seconds"?} → 201 as above, with "replaces", "replaced_until"
DELETE /api/v1/keys/{id}                 204
POST   /api/v1/runs/{run}/keys           {"kind"?: "run" | "trainer", "name"?} → 201 {"id", "key", …}
GET    /api/v1/runs/{run}/keys           {"keys": [KeyView…]}
DELETE /api/v1/runs/{run}/keys/{id}      204
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.access import Principal, PrincipalKind, Right, may_manage_key, require_right
from proxy.auth.service import BOOTSTRAP, Credentials, KeyChange, KeyView, NewKey
from proxy.errors import InvalidRequest, NotFound, PermissionDenied
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.keys.scopes import Scope, checked_scope
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, permitted_run_id
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import Directory, permitted_project_id
from proxy.settings import GivenLimits

router = APIRouter(prefix="/api/v1", tags=["keys"], route_class=StrictRoute)

_LONGEST_GRACE = 30 * 86400.0
_LONGEST_LIFE = 3650 * 86400.0
# Session keys are listed only on request: there may be one per session.
_DEFAULT_KINDS = tuple(kind for kind in PrincipalKind if kind is not PrincipalKind.SESSION)


def credentials_of(request: Request) -> Credentials:
    return service(request, Credentials)


Keys = Annotated[Credentials, Depends(credentials_of)]
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


class NewKeyBody(NewRunKeyBody):
    """A new key. A `run` key needs a `run` (a name or an id), a `project` key a `project`; a `trainer` key needs
    either or `all_runs`, a `viewer` key a `project` or `all_runs`. It expires after `expires_in` seconds. `limits`
    bind the calls made with a run or project key."""

    kind: Literal["admin", "project", "run", "trainer", "viewer"]  # type: ignore[assignment]
    run: str | None = None
    project: str | None = None
    all_runs: bool = False


class ChangedKeyBody(BaseModel):
    """A change of a key. `expires_in` is in seconds from now, null for never; null for `limits` removes them."""

    model_config = ConfigDict(extra="forbid")

    name: Label = None
    expires_in: Lifetime = None
    limits: GivenLimits | None = None


class RotateBody(BaseModel):
    """The rotation of a key. The replaced key stays valid for `grace_seconds`."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[float, Field(ge=0, le=_LONGEST_GRACE, allow_inf_nan=False)] = 0.0


@router.get("/keys")
async def keys(
    who: Who,
    overview: Overview,
    credentials: Keys,
    projects: Directory,
    kind: PrincipalKind | None = None,
    run: str | None = None,
    project: str | None = None,
    revoked: Annotated[bool, Query()] = False,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List keys without their texts. Session keys need `kind=session`; `revoked=true` adds revoked and expired ones.
    `project` selects the keys of a project and of its runs."""
    require_right(who, Right.CHANGE)
    after = None if cursor is None else Cursor.decode(cursor)
    found = await credentials.page(
        kinds=_DEFAULT_KINDS if kind is None else (kind,),
        run_id=None if run is None else await permitted_run_id(run, who, overview, Right.CHANGE),
        project_id=await permitted_project_id(project, who, projects),
        with_revoked=revoked,
        below=None if after is None else (after.at, after.key),
        limit=limit + 1,
    )
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else Cursor(at=last.created_at, key=last.id).encode()
    return json_answer({"keys": found[:limit], "next_cursor": following})


@router.get("/keys/self")
async def own_key(who: Who, credentials: Keys) -> Response:
    """Show the request's key, so that the holder of a key's text can find out which key it is."""
    return json_answer(await credentials.find(who.key_id))


@router.post("/keys", status_code=201, openapi_extra=described(NewKeyBody, answers={201: "The new key."}))
async def create_key(
    request: Request, who: Who, overview: Overview, credentials: Keys, projects: Directory
) -> Response:
    """Create a key. `key` in the response is its text, which cannot be read again."""
    require_right(who, Right.CHANGE)
    body = validated(NewKeyBody, await json_body(request))
    kind = PrincipalKind(body.kind)
    scope = checked_scope(kind, Scope(run=body.run, project=body.project, all_runs=body.all_runs))
    name = _checked_name(body)
    run_id = None if scope.run is None else await permitted_run_id(scope.run, who, overview, Right.CHANGE)
    project_id = None if scope.project is None else await permitted_project_id(scope.project, who, projects)
    within = project_id if run_id is None else (await overview.owner_of(run_id)).project_id
    _check_manages(who, kind, within)
    made = await credentials.create(
        kind, run_id=run_id, project_id=project_id, label=name, expires_in=body.expires_in, limits=body.limits
    )
    return json_answer(_shown(made, await credentials.find(made.id)), status=201)


@router.get("/keys/{key_id}")
async def key(key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Show a key, whether it is valid or not."""
    return json_answer(await _managed(key_id, who, overview, credentials))


@router.patch("/keys/{key_id}", openapi_extra=described(ChangedKeyBody, answers={200: "The key as changed."}))
async def change_key(key_id: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Change the name, the expiry or the limits of a key; its text stays."""
    await _managed(key_id, who, overview, credentials)
    body = validated(ChangedKeyBody, await json_body(request))
    given = body.model_fields_set
    if not given:
        raise InvalidRequest("give `name`, `expires_in` or `limits`", param="name")
    if body.name == BOOTSTRAP:
        raise _reserved("name")
    change = KeyChange(
        name=body.name if "name" in given else msgspec.UNSET,
        expires_in=body.expires_in if "expires_in" in given else msgspec.UNSET,
        limits=(body.limits or GivenLimits()) if "limits" in given else msgspec.UNSET,
    )
    return json_answer(await credentials.change(key_id, change))


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    openapi_extra=described(RotateBody, answers={201: "The new key."}, may_be_absent=True),
)
async def rotate_key(key_id: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Replace a key by a new one with the same scope, name and lifetime."""
    await _managed(key_id, who, overview, credentials)
    body = validated(RotateBody, await _object(request))
    rotated = await credentials.rotate(key_id, grace_seconds=body.grace_seconds)
    more = {"replaces": key_id, "replaced_until": rotated.replaced_until}
    return json_answer(_shown(rotated.key, rotated.view) | more, status=201)


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_key(key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Revoke a key of any kind except the last admin key."""
    await _managed(key_id, who, overview, credentials)
    await credentials.revoke(key_id)
    return Response(status_code=204)


@router.post(
    "/runs/{run}/keys",
    status_code=201,
    openapi_extra=described(NewRunKeyBody, answers={201: "The new key."}, may_be_absent=True),
)
async def create_run_key(run: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Create a key of a run. `key` in the response is its text, which cannot be read again."""
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    body = validated(NewRunKeyBody, await _object(request))
    name = _checked_name(body)
    made = await credentials.create(
        PrincipalKind(body.kind), run_id=run_id, label=name, expires_in=body.expires_in, limits=body.limits
    )
    return json_answer({"id": made.id, "key": made.text, "kind": body.kind, "name": name, "label": name}, status=201)


@router.get("/runs/{run}/keys")
async def run_keys(run: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    return json_answer({"keys": await credentials.list_(run_id)})


@router.delete("/runs/{run}/keys/{key_id}", status_code=204)
async def revoke_run_key(run: str, key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    if key_id not in {key.id for key in await credentials.list_(run_id)}:
        raise NotFound(f"the run {run!r} has no key {key_id!r}")
    await credentials.revoke(key_id)
    return Response(status_code=204)


async def _managed(key_id: str, who: Principal, overview: OverviewService, credentials: Credentials) -> KeyView:
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
            f"a {who.kind.value} key manages the run, trainer and viewer keys of its project: a {kind.value} key like"
            " this needs an admin key"
        )


async def _object(request: Request) -> Any:
    """Return the JSON body; an absent body counts as an empty object."""
    body = await json_body(request)
    return {} if body is None else body


def _shown(made: NewKey, view: KeyView | None) -> dict[str, Any]:
    """Return the key's view with its text."""
    return {**msgspec.to_builtins(view), "key": made.text}


def _checked_name(body: NewRunKeyBody) -> str | None:
    """Return the name of the new key. Raise InvalidRequest for two different ones, and for the name of configured
    keys."""
    param = "label" if body.name is None else "name"
    name = body.label if body.name is None else body.name
    if body.label not in (None, name):
        raise InvalidRequest("`label` is an older word for `name`: give one of them", param="label")
    # The next restart revokes keys with this name that the configuration does not contain.
    if name == BOOTSTRAP:
        raise _reserved(param)
    return name


def _reserved(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"the {param} {BOOTSTRAP!r} is reserved for keys of the configuration: choose another", param=param
    )
