"""API keys over HTTP, for admin keys. Only the response that creates a key contains its text.

GET    /api/v1/keys                      {"keys": [KeyView…], "next_cursor"}, newest first
GET    /api/v1/keys/self                 KeyView of the request's key; for every kind
POST   /api/v1/keys                      {"kind", "run"?, "label"?} → 201 {"id", "key", "kind", …}
POST   /api/v1/keys/{id}/rotate          {"grace_seconds"?} → 201 as above, with "replaces", "replaced_until"
DELETE /api/v1/keys/{id}                 204
POST   /api/v1/runs/{run}/keys           {"kind"?: "run" | "trainer", "label"?} → 201 {"id", "key", …}
GET    /api/v1/runs/{run}/keys           {"keys": [KeyView…]}
DELETE /api/v1/runs/{run}/keys/{id}      204
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.http import require
from proxy.auth.service import BOOTSTRAP, Credentials, KeyView, NewKey, PrincipalKind
from proxy.errors import InvalidRequest, NotFound
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Limit, Overview, Who, json_answer
from proxy.overview.filters import Cursor

router = APIRouter(prefix="/api/v1", tags=["keys"], route_class=StrictRoute)

_LONGEST_GRACE = 30 * 86400.0
# Session keys are listed only on request: there may be one per session.
_DEFAULT_KINDS = (PrincipalKind.ADMIN, PrincipalKind.RUN, PrincipalKind.TRAINER)


def credentials_of(request: Request) -> Credentials:
    return service(request, Credentials)


Keys = Annotated[Credentials, Depends(credentials_of)]
Label = Annotated[str | None, Field(max_length=200)]


class NewRunKeyBody(BaseModel):
    """A new key for the run in the path."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["run", "trainer"] = "run"
    label: Label = None


class NewKeyBody(BaseModel):
    """A new key. `run` (a name or an id) is required for every kind but `admin`."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["admin", "run", "trainer"]
    run: str | None = None
    label: Label = None


class RotateBody(BaseModel):
    """The rotation of a key. The replaced key stays valid for `grace_seconds`."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[float, Field(ge=0, le=_LONGEST_GRACE, allow_inf_nan=False)] = 0.0


@router.get("/keys")
async def keys(
    who: Who,
    overview: Overview,
    credentials: Keys,
    kind: Literal["admin", "run", "session", "trainer"] | None = None,
    run: str | None = None,
    revoked: Annotated[bool, Query()] = False,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List keys without their texts. Session keys need `kind=session`, revoked keys `revoked=true`."""
    require(who, PrincipalKind.ADMIN)
    after = None if cursor is None else Cursor.decode(cursor)
    found = await credentials.page(
        kinds=_DEFAULT_KINDS if kind is None else (PrincipalKind(kind),),
        run_id=None if run is None else await overview.run_id(run),
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
async def create_key(request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Create a key. `key` in the response is its text, which cannot be read again."""
    require(who, PrincipalKind.ADMIN)
    body = validated(NewKeyBody, await json_body(request))
    if (body.run is None) != (body.kind == "admin"):
        what = (
            "an admin key is for all runs: omit `run`" if body.run else f"a {body.kind} key needs a run: give `run`"
        )
        raise InvalidRequest(what, param="run")
    _check_label(body.label)
    run_id = None if body.run is None else await overview.run_id(body.run)
    made = await credentials.create(PrincipalKind(body.kind), run_id=run_id, label=body.label)
    view = await credentials.find(made.id)
    return json_answer(_shown(made, view), status=201)


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    openapi_extra=described(RotateBody, answers={201: "The new key."}, may_be_absent=True),
)
async def rotate_key(key_id: str, request: Request, who: Who, credentials: Keys) -> Response:
    """Replace a key by a new one for the same run and with the same label."""
    require(who, PrincipalKind.ADMIN)
    body = validated(RotateBody, await _object(request))
    rotated = await credentials.rotate(key_id, grace_seconds=body.grace_seconds)
    more = {"replaces": key_id, "replaced_until": rotated.replaced_until}
    return json_answer(_shown(rotated.key, rotated.view) | more, status=201)


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_key(key_id: str, who: Who, credentials: Keys) -> Response:
    """Revoke a key of any kind except the last admin key."""
    require(who, PrincipalKind.ADMIN)
    await credentials.revoke(key_id)
    return Response(status_code=204)


@router.post(
    "/runs/{run}/keys",
    status_code=201,
    openapi_extra=described(NewRunKeyBody, answers={201: "The new key."}, may_be_absent=True),
)
async def create_run_key(run: str, request: Request, who: Who, overview: Overview, credentials: Keys) -> Response:
    """Create a key of a run. `key` in the response is its text, which cannot be read again."""
    require(who, PrincipalKind.ADMIN)
    body = validated(NewRunKeyBody, await _object(request))
    _check_label(body.label)
    run_id = await overview.run_id(run)
    made = await credentials.create(PrincipalKind(body.kind), run_id=run_id, label=body.label)
    return json_answer({"id": made.id, "key": made.text, "kind": body.kind, "label": body.label}, status=201)


@router.get("/runs/{run}/keys")
async def run_keys(run: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    require(who, PrincipalKind.ADMIN)
    return json_answer({"keys": await credentials.list_(await overview.run_id(run))})


@router.delete("/runs/{run}/keys/{key_id}", status_code=204)
async def revoke_run_key(run: str, key_id: str, who: Who, overview: Overview, credentials: Keys) -> Response:
    require(who, PrincipalKind.ADMIN)
    run_id = await overview.run_id(run)
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


def _check_label(label: str | None) -> None:
    """Raise InvalidRequest for the label of configured keys."""
    # The next restart revokes keys with this label that the configuration does not contain.
    if label == BOOTSTRAP:
        raise InvalidRequest(
            f"the label {BOOTSTRAP!r} is reserved for keys of the configuration: choose another", param="label"
        )
