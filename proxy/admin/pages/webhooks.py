"""The pages of webhooks: which there are, whether they work, and what they sent."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, PAGE_SIZE, Administrator, page_router, query_of
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.contract.states import JobState
from proxy.errors import Conflict
from proxy.http.services import service
from proxy.overview.endpoints import Overview
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService
from proxy.webhooks.service import WebhookChange, WebhookService

router = page_router()


def _webhooks(request: Request) -> WebhookService:
    return service(request, WebhookService)


Webhooks = Annotated[WebhookService, Depends(_webhooks)]


@router.get("/webhooks")
async def webhooks(service_: Webhooks, overview: Overview, visitor: Administrator) -> Response:
    found = await service_.list_(run_id=None, project_id=None)
    return HTMLResponse(render("webhooks.html", visitor=visitor, webhooks=found, now=overview.now()))


@router.get("/webhooks/{webhook_id}")
async def webhook(
    webhook_id: str,
    service_: Webhooks,
    overview: Overview,
    visitor: Administrator,
    dead: bool = False,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show a webhook with its deliveries, newest first; with `dead`, those that failed for good."""
    return HTMLResponse(await _page(webhook_id, service_, overview, visitor, dead=dead, cursor=cursor))


@router.post("/webhooks/{webhook_id}/{change}", dependencies=[OWN_ORIGIN])
async def change_webhook(
    webhook_id: str, change: Literal["test", "enable", "disable"], service_: Webhooks, _visitor: Administrator
) -> Response:
    """Send a test message, or enable or disable the webhook."""
    if change == "test":
        await service_.test(webhook_id)
    else:
        await service_.change(webhook_id, WebhookChange(enabled=change == "enable"))
    return RedirectResponse(f"/admin/webhooks/{webhook_id}", status_code=303)


@router.post("/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", dependencies=[OWN_ORIGIN])
async def redeliver(
    webhook_id: str, delivery_id: str, service_: Webhooks, overview: Overview, visitor: Administrator
) -> Response:
    """Deliver a message again; one that is under way is shown with the reason why not."""
    try:
        await service_.redeliver(webhook_id, delivery_id)
    except Conflict as error:
        page = await _page(webhook_id, service_, overview, visitor, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/webhooks/{webhook_id}", status_code=303)


async def _page(
    webhook_id: str,
    service_: WebhookService,
    overview: OverviewService,
    visitor: Visitor,
    *,
    dead: bool = False,
    cursor: str = "",
    problem: str | None = None,
) -> str:
    found = await service_.deliveries(
        webhook_id,
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
        webhook=await service_.get(webhook_id),
        deliveries=found[:PAGE_SIZE],
        dead=dead,
        problem=problem,
        newest=query_of(only) if cursor else None,
        older=None if following is None else query_of(only | following),
        now=overview.now(),
    )
