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

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from proxy.auth.access import PrincipalKind, Right, require_right
from proxy.auth.service import Credentials, KeyView, NewKey
from proxy.errors import NotFound
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.keys.requests import ChangedKeyBody, NewKeyBody, NewRunKeyBody, RotateBody, create_checked, managed_key
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, permitted_run_id
from proxy.overview.filters import Cursor
from proxy.projects.endpoints import Directory, permitted_project_id

router = APIRouter(prefix="/api/v1", tags=["keys"], route_class=StrictRoute)

# Session keys are listed only on request: there may be one per session.
_DEFAULT_KINDS = tuple(kind for kind in PrincipalKind if kind is not PrincipalKind.SESSION)


def credentials_of(request: Request) -> Credentials:
    return service(request, Credentials)


Keys = Annotated[Credentials, Depends(credentials_of)]


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
    made = await create_checked(body, who, overview, credentials, projects)
    return json_answer(_shown(made, await credentials.find(made.id)), status=201)


@router.get("/keys/{key_id}")
async def key(key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Show a key, whether it is valid or not."""
    return json_answer(await managed_key(key_id, who, overview, credentials))


@router.patch("/keys/{key_id}", openapi_extra=described(ChangedKeyBody, answers={200: "The key as changed."}))
async def change_key(key_id: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Change the name, the expiry or the limits of a key; its text stays."""
    await managed_key(key_id, who, overview, credentials)
    body = validated(ChangedKeyBody, await json_body(request))
    return json_answer(await credentials.change(key_id, body.change))


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    openapi_extra=described(RotateBody, answers={201: "The new key."}, may_be_absent=True),
)
async def rotate_key(key_id: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Replace a key by a new one with the same scope, name and lifetime."""
    await managed_key(key_id, who, overview, credentials)
    body = validated(RotateBody, await _object(request))
    rotated = await credentials.rotate(key_id, grace_seconds=body.grace_seconds)
    more = {"replaces": key_id, "replaced_until": rotated.replaced_until}
    return json_answer(_shown(rotated.key, rotated.view) | more, status=201)


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_key(key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Revoke a key of any kind except the last admin key."""
    await managed_key(key_id, who, overview, credentials)
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
    name = body.checked_name
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


async def _object(request: Request) -> Any:
    """Return the JSON body; an absent body counts as an empty object."""
    body = await json_body(request)
    return {} if body is None else body


def _shown(made: NewKey, view: KeyView | None) -> dict[str, Any]:
    """Return the key's view with its text."""
    return {**msgspec.to_builtins(view), "key": made.text}
