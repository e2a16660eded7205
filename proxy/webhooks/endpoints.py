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

from proxy.auth.access import Right, require_right
from proxy.contract.states import JobState
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, permitted_run_id
from proxy.overview.filters import Cursor
from proxy.projects.endpoints import Directory, permitted_project_id
from proxy.webhooks.requests import (
    ChangedWebhookBody,
    NewWebhookBody,
    RotatedSecretBody,
    create_permitted,
    managed_webhook,
)
from proxy.webhooks.service import WebhookChange, WebhookService
from proxy.webhooks.views import NewSecret

router = APIRouter(prefix="/api/v1/webhooks", tags=["webhooks"], route_class=StrictRoute)


def webhooks_of(request: Request) -> WebhookService:
    return service(request, WebhookService)


Webhooks = Annotated[WebhookService, Depends(webhooks_of)]


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
    made = await create_permitted(body, who, webhooks, overview, projects)
    return json_answer(_with_secret(made), status=201)


@router.get("/{webhook}")
async def show_webhook(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    return json_answer(await managed_webhook(webhook, who, webhooks, overview))


@router.patch("/{webhook}", openapi_extra=described(ChangedWebhookBody, answers={200: "The webhook as changed."}))
async def change_webhook(
    webhook: str, request: Request, who: Who, webhooks: Webhooks, overview: Overview
) -> Response:
    """Change a webhook, or enable it again after it was disabled."""
    view = await managed_webhook(webhook, who, webhooks, overview)
    body = validated(ChangedWebhookBody, await json_body(request))
    return json_answer(await webhooks.change(view.id, WebhookChange(**body.model_dump())))


@router.delete("/{webhook}", status_code=204)
async def delete_webhook(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Delete a webhook with its deliveries, also those that wait."""
    view = await managed_webhook(webhook, who, webhooks, overview)
    await webhooks.delete(view.id)
    return Response(status_code=204)


@router.post(
    "/{webhook}/rotate",
    status_code=201,
    openapi_extra=described(RotatedSecretBody, answers={201: "The webhook with its secret."}, may_be_absent=True),
)
async def rotate_secret(webhook: str, request: Request, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Replace the secret of a webhook."""
    view = await managed_webhook(webhook, who, webhooks, overview)
    given = await json_body(request)
    body = validated(RotatedSecretBody, {} if given is None else given)
    return json_answer(_with_secret(await webhooks.rotate(view.id, grace_seconds=body.grace_seconds)), status=201)


@router.post("/{webhook}/test", status_code=202)
async def send_test(webhook: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Send a message of type `webhook.test`, once, also if the webhook is disabled."""
    view = await managed_webhook(webhook, who, webhooks, overview)
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
    view = await managed_webhook(webhook, who, webhooks, overview)
    below = None if cursor is None else Cursor.decode(cursor).key
    found = await webhooks.deliveries(view.id, states=state, below=below, limit=limit + 1)
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else Cursor(at=last.created_at, key=last.id).encode()
    return json_answer({"deliveries": found[:limit], "next_cursor": following})


@router.get("/{webhook}/deliveries/{delivery}")
async def show_delivery(webhook: str, delivery: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    view = await managed_webhook(webhook, who, webhooks, overview)
    return json_answer(await webhooks.delivery(view.id, delivery))


@router.post("/{webhook}/deliveries/{delivery}/redeliver", status_code=202)
async def redeliver(webhook: str, delivery: str, who: Who, webhooks: Webhooks, overview: Overview) -> Response:
    """Deliver a message again, with the same id; 409 while it is under way."""
    view = await managed_webhook(webhook, who, webhooks, overview)
    return json_answer(await webhooks.redeliver(view.id, delivery), status=202)


def _with_secret(made: NewSecret) -> dict[str, Any]:
    return {**msgspec.to_builtins(made.webhook), "secret": made.secret}
