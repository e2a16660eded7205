"""The pages that create and delete webhooks, and that replace their secrets."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import (
    NO_STORE,
    OWN_ORIGIN,
    Manager,
    chosen_seconds,
    field_errors,
    form_of,
    page_router,
)
from proxy.admin.pages.webhooks import GRACES, webhook_page
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from proxy.http.body import validated
from proxy.overview.endpoints import Overview
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import Directory
from proxy.projects.service import ProjectDirectory
from proxy.webhooks.endpoints import Webhooks
from proxy.webhooks.messages import KNOWN_EVENTS
from proxy.webhooks.requests import NewWebhookBody, RotatedSecretBody, create_permitted, managed_webhook
from proxy.webhooks.views import NewSecret

router = page_router()

_FIELDS = ("url", "events", "run", "project", "label")
_DOMAINS = tuple(dict.fromkeys(kind.partition(".")[0] for kind in KNOWN_EVENTS))


@router.get("/new-webhook")
async def new_webhook_form(overview: Overview, directory: Directory, visitor: Manager) -> Response:
    return HTMLResponse(await _form_page(overview, directory, visitor, {}, {}))


@router.post("/new-webhook", dependencies=[OWN_ORIGIN])
async def create_webhook(
    request: Request, service_: Webhooks, overview: Overview, directory: Directory, visitor: Manager
) -> Response:
    """Create a webhook and show its secret once, or show the form again with the error beside its field."""
    form = {name: text.strip() for name, text in (await form_of(request)).items()}
    try:
        given: dict[str, Any] = {name: form[name] for name in ("run", "project", "label") if form.get(name)}
        given |= {"url": form.get("url", ""), "events": re.findall(r"[^\s,]+", form.get("events", ""))}
        body = validated(NewWebhookBody, given)
        made = await create_permitted(body, visitor.principal, service_, overview, directory)
    except (InvalidRequest, NotFound, PermissionDenied, Conflict) as error:
        page = await _form_page(overview, directory, visitor, form, field_errors(error, _FIELDS))
        return HTMLResponse(page, status_code=400 if isinstance(error, NotFound) else error.status)
    return _secret_page(visitor, made)


@router.post("/webhooks/{webhook_id}/rotate", dependencies=[OWN_ORIGIN])
async def rotate_secret(
    webhook_id: str, request: Request, service_: Webhooks, overview: Overview, visitor: Manager
) -> Response:
    """Replace the secret of a webhook, and show the new one once."""
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    form = await form_of(request)
    try:
        body = validated(RotatedSecretBody, {"grace_seconds": chosen_seconds(form.get("grace", ""), GRACES)})
    except InvalidRequest as error:
        page = await webhook_page(view, service_, overview, visitor, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    return _secret_page(visitor, await service_.rotate(view.id, grace_seconds=body.grace_seconds))


@router.get("/webhooks/{webhook_id}/delete")
async def delete_form(webhook_id: str, service_: Webhooks, overview: Overview, visitor: Manager) -> Response:
    """Ask whether a webhook is to be deleted."""
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    return HTMLResponse(render("delete_webhook.html", visitor=visitor, webhook=view, now=overview.now()))


@router.post("/webhooks/{webhook_id}/delete", dependencies=[OWN_ORIGIN])
async def delete_webhook(webhook_id: str, service_: Webhooks, overview: Overview, visitor: Manager) -> Response:
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    await service_.delete(view.id)
    return RedirectResponse("/admin/webhooks", status_code=303)


def _secret_page(visitor: Visitor, made: NewSecret) -> Response:
    page = render("webhook_secret.html", visitor=visitor, webhook=made.webhook, secret=made.secret)
    return HTMLResponse(page, headers=NO_STORE)


async def _form_page(
    overview: OverviewService,
    directory: ProjectDirectory,
    visitor: Visitor,
    form: dict[str, str],
    errors: dict[str, str],
) -> str:
    # A request that no form of ours sent may lack fields.
    form = dict.fromkeys(_FIELDS, "") | form
    runs = [run.name for run in await overview.board.glances() if visitor.may_see(run)]
    projects = [project.name for project in await directory.list_()] if visitor.is_admin else []
    values = {"runs": runs, "projects": projects, "domains": _DOMAINS}
    return render("webhook_form.html", visitor=visitor, form=form, errors=errors, **values)
