"""The pages of webhooks: which there are, whether they work, and what they sent. Each shows and changes what the
API would with the visitor's key."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, PAGE_SIZE, Manager, page_router, query_of, scope_names
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.contract.states import JobState
from proxy.errors import Conflict
from proxy.overview.endpoints import Overview
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import Directory, permitted_project_id
from proxy.webhooks.endpoints import Webhooks
from proxy.webhooks.requests import managed_webhook
from proxy.webhooks.service import WebhookChange, WebhookService
from proxy.webhooks.views import WebhookView

router = page_router()


GRACES = {
    "0": "signs no more",
    "3600": "signs too for an hour",
    "86400": "signs too for a day",
    "604800": "signs too for a week",
}
"""The choices for the replaced secret of a rotation."""


@router.get("/webhooks")
async def webhooks(
    request: Request, service_: Webhooks, overview: Overview, directory: Directory, visitor: Manager
) -> Response:
    project_id = await permitted_project_id(None, visitor.principal, directory)
    found = await service_.list_(run_id=None, project_id=project_id)
    names = await scope_names(request, overview)
    return HTMLResponse(render("webhooks.html", visitor=visitor, webhooks=found, names=names, now=overview.now()))


@router.get("/webhooks/{webhook_id}")
async def webhook(
    webhook_id: str,
    service_: Webhooks,
    overview: Overview,
    visitor: Manager,
    dead: bool = False,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show a webhook with its deliveries, newest first; with `dead`, those that failed for good."""
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    return HTMLResponse(await webhook_page(view, service_, overview, visitor, dead=dead, cursor=cursor))


@router.post("/webhooks/{webhook_id}/{change}", dependencies=[OWN_ORIGIN])
async def change_webhook(
    webhook_id: str,
    change: Literal["test", "enable", "disable"],
    service_: Webhooks,
    overview: Overview,
    visitor: Manager,
) -> Response:
    """Send a test message, or enable or disable the webhook."""
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    if change == "test":
        await service_.test(view.id)
    else:
        await service_.change(view.id, WebhookChange(enabled=change == "enable"))
    return RedirectResponse(f"/admin/webhooks/{view.id}", status_code=303)


@router.post("/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", dependencies=[OWN_ORIGIN])
async def redeliver(
    webhook_id: str, delivery_id: str, service_: Webhooks, overview: Overview, visitor: Manager
) -> Response:
    """Deliver a message again; one that is under way is shown with the reason why not."""
    view = await managed_webhook(webhook_id, visitor.principal, service_, overview)
    try:
        await service_.redeliver(view.id, delivery_id)
    except Conflict as error:
        page = await webhook_page(view, service_, overview, visitor, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/webhooks/{view.id}", status_code=303)


async def webhook_page(
    view: WebhookView,
    service_: WebhookService,
    overview: OverviewService,
    visitor: Visitor,
    *,
    dead: bool = False,
    cursor: str = "",
    problem: str | None = None,
) -> str:
    """Render the page of a webhook, with the reason why something was not done."""
    found = await service_.deliveries(
        view.id,
        states=(JobState.DEAD,) if dead else None,
        below=Cursor.decode(cursor).key if cursor else None,
        limit=PAGE_SIZE + 1,
    )
    last = found[PAGE_SIZE - 1] if len(found) > PAGE_SIZE else None
    only = {"dead": "true"} if dead else {}
    following = None if last is None else {"cursor": Cursor(at=last.created_at, key=last.id).encode()}
    return render(
        "webhook.html",
        visitor=visitor,
        webhook=view,
        deliveries=found[:PAGE_SIZE],
        dead=dead,
        problem=problem,
        graces=GRACES,
        newest=query_of(only) if cursor else None,
        older=None if following is None else query_of(only | following),
        now=overview.now(),
    )
