"""Webhooks over HTTP, under /api/v1. An admin key manages all of them, the key of a project those of the project and
of its runs. Only the responses that make a secret contain it.

GET    /api/v1/webhooks                              {"webhooks": [WebhookView…]}
POST   /api/v1/webhooks                              NewWebhookBody → 201 WebhookView with "secret"
GET    /api/v1/webhooks/{webhook}                    WebhookView
PATCH  /api/v1/webhooks/{webhook}                    {"url"?, "events"?, "label"?, "enabled"?} → WebhookView
DELETE /api/v1/webhooks/{webhook}                    204
POST   /api/v1/webhooks/{webhook}/rotate             {"grace_seconds"?} → 201 WebhookView with "secret"
POST   /api/v1/webhooks/{webhook}/test               202 DeliveryView
GET    /api/v1/webhooks/{webhook}/deliveries         {"deliveries": [DeliveryView…], "next_cursor"}, newest first
GET    /api/v1/webhooks/{webhook}/deliveries/{id}    DeliveryView
POST   /api/v1/webhooks/{webhook}/deliveries/{id}/redeliver   202 DeliveryView
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from proxy.auth.access import Principal, Right, require_right
from proxy.contract.states import JobState
from proxy.errors import InvalidRequest, NotFound
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.outbound.targets import MAX_URL_CHARACTERS
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, permitted_run_id
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import Directory, permitted_project_id
from proxy.webhooks.service import WebhookChange, WebhookRequest, WebhookService
from proxy.webhooks.views import NewSecret, WebhookView

router = APIRouter(prefix="/api/v1/webhooks", tags=["webhooks"], route_class=StrictRoute)

_LONGEST_GRACE = 30 * 86400.0


def webhooks_of(request: Request) -> WebhookService:
    return service(request, WebhookService)


Webhooks = Annotated[WebhookService, Depends(webhooks_of)]
Url = Annotated[str, Field(max_length=MAX_URL_CHARACTERS)]
Events = Annotated[tuple[str, ...], Field(min_length=1, max_length=50)]
Label = Annotated[str | None, Field(max_length=200)]


class NewWebhookBody(BaseModel):
    """A new webhook. `run` and `project` are names or ids; without them an admin key's webhook is for the whole
    installation and a project key's for its project."""

    model_config = ConfigDict(extra="forbid")

    url: Url
    events: Events
    run: str | None = None
    project: str | None = None
    label: Label = None


class ChangedWebhookBody(BaseModel):
    """Changes of a webhook; absent fields stay as they are."""

    model_config = ConfigDict(extra="forbid")

    url: Url | None = None
    events: Events | None = None
    label: Label = None
    enabled: StrictBool | None = None


class RotatedSecretBody(BaseModel):
    """The rotation of a secret. Requests are signed with the replaced one too for `grace_seconds`."""

    model_config = ConfigDict(extra="forbid")

    grace_seconds: Annotated[float, Field(ge=0, le=_LONGEST_GRACE, allow_inf_nan=False)] = 86400.0


@router.get("")
async def list_webhooks(
    who: Who,
    webhooks: Webhooks,
    overview: Overview,
    projects: Directory,
    run: str | None = None,
    project: str | None = None,
) -> Response:
    """List webhooks, oldest first: those of a `run`, or those of a `project` and of its runs."""
    require_right(who, Right.CHANGE)
    run_id = None if run is None else await permitted_run_id(run, who, overview, Right.CHANGE)
    project_id = await permitted_project_id(project, who, projects)
    return json_answer({"webhooks": await webhooks.list_(run_id=run_id, project_id=project_id)})


@router.post("", status_code=201, openapi_extra=described(NewWebhookBody, answers={201: "The new webhook."}))
async def create_webhook(
    request: Request, who: Who, webhooks: Webhooks, overview: Overview, projects: Directory
) -> Response:
    """Create a webhook. `secret` in the response verifies its requests and cannot be read again."""
    require_right(who, Right.CHANGE)
    body = validated(NewWebhookBody, await json_body(request))
    if body.run is not None and body.project is not None:
        raise InvalidRequest("a webhook is for a run or for a project: give one of them", param="project")
    run_id = None if body.run is None else await permitted_run_id(body.run, who, overview, Right.CHANGE)
    project_id = None if body.run is not None else await permitted_project_id(body.project, who, projects)
    made = await webhooks.create(
        WebhookRequest(url=body.url, events=body.events, run_id=run_id, project_id=project_id, label=body.label)
    )
    return json_answer(_with_secret(made), status=201)


@router.get("/{webhook}")
async def show_webhook(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    return json_answer(await _managed(webhook, who, webhooks, overview))


@router.patch("/{webhook}", openapi_extra=described(ChangedWebhookBody, answers={200: "The webhook as changed."}))
async def change_webhook(
    webhook: str, request: Request, who: Who, webhooks: Webhooks, overview: Overview
) -> Response:
    """Change a webhook, or enable it again after it was disabled."""
    view = await _managed(webhook, who, webhooks, overview)
    body = validated(ChangedWebhookBody, await json_body(request))
    return json_answer(await webhooks.change(view.id, WebhookChange(**body.model_dump())))


@router.delete("/{webhook}", status_code=204)
async def delete_webhook(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Delete a webhook with its deliveries, also those that wait."""
    view = await _managed(webhook, who, webhooks, overview)
    await webhooks.delete(view.id)
    return Response(status_code=204)


@router.post(
    "/{webhook}/rotate",
    status_code=201,
    openapi_extra=described(RotatedSecretBody, answers={201: "The webhook with its secret."}, may_be_absent=True),
)
async def rotate_secret(webhook: str, request: Request, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Replace the secret of a webhook."""
    view = await _managed(webhook, who, webhooks, overview)
    given = await json_body(request)
    body = validated(RotatedSecretBody, {} if given is None else given)
    return json_answer(_with_secret(await webhooks.rotate(view.id, grace_seconds=body.grace_seconds)), status=201)


@router.post("/{webhook}/test", status_code=202)
async def send_test(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Send a message of type `webhook.test`, once, also if the webhook is disabled."""
    view = await _managed(webhook, who, webhooks, overview)
    return json_answer(await webhooks.test(view.id), status=202)


@router.get("/{webhook}/deliveries")
async def deliveries(
    webhook: str,
    who: Who,
    webhooks: Webhooks,
    overview: Overview,
    state: Annotated[list[JobState] | None, Query()] = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List deliveries, newest first. `state=dead` selects those that failed for good."""
    view = await _managed(webhook, who, webhooks, overview)
    below = None if cursor is None else Cursor.decode(cursor).key
    found = await webhooks.deliveries(view.id, states=state, below=below, limit=limit + 1)
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else Cursor(at=last.created_at, key=last.id).encode()
    return json_answer({"deliveries": found[:limit], "next_cursor": following})


@router.get("/{webhook}/deliveries/{delivery}")
async def show_delivery(webhook: str, delivery: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    view = await _managed(webhook, who, webhooks, overview)
    return json_answer(await webhooks.delivery(view.id, delivery))


@router.post("/{webhook}/deliveries/{delivery}/redeliver", status_code=202)
async def redeliver(webhook: str, delivery: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Deliver a message again, with the same id; 409 while it is under way."""
    view = await _managed(webhook, who, webhooks, overview)
    return json_answer(await webhooks.redeliver(view.id, delivery), status=202)


async def _managed(
    webhook_id: str, who: Principal, webhooks: WebhookService, overview: OverviewService
) -> WebhookView:
    """Return a webhook that the key may manage. Raise NotFound for any other."""
    require_right(who, Right.CHANGE)
    view = await webhooks.get(webhook_id)
    owner = view.project_id if view.run_id is None else (await overview.owner_of(view.run_id)).project_id
    if who.project_id not in (None, owner):
        raise NotFound(f"there is no webhook {webhook_id!r}", param="webhook")
    return view


def _with_secret(made: NewSecret) -> dict[str, Any]:
    return {**msgspec.to_builtins(made.webhook), "secret": made.secret}
