"""Requests for webhooks, and who may make them: shared by the API and the admin page."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from proxy.auth.access import Principal, Right, require_right
from proxy.errors import InvalidRequest, NotFound
from proxy.outbound.targets import MAX_URL_CHARACTERS
from proxy.overview.endpoints import permitted_run_id
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import permitted_project_id
from proxy.projects.service import ProjectDirectory
from proxy.webhooks.service import WebhookRequest, WebhookService
from proxy.webhooks.views import NewSecret, WebhookView

_LONGEST_GRACE = 30 * 86400.0

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


async def create_permitted(
    body: NewWebhookBody,
    who: Principal,
    webhooks: WebhookService,
    overview: OverviewService,
    projects: ProjectDirectory,
) -> NewSecret:
    """Create a webhook. Raise InvalidRequest, PermissionDenied, and NotFound for a scope that `who` does not have."""
    require_right(who, Right.CHANGE)
    if body.run is not None and body.project is not None:
        raise InvalidRequest("a webhook is for a run or for a project: give one of them", param="project")
    run_id = None if body.run is None else await permitted_run_id(body.run, who, overview, Right.CHANGE)
    project_id = None if body.run is not None else await permitted_project_id(body.project, who, projects)
    return await webhooks.create(
        WebhookRequest(url=body.url, events=body.events, run_id=run_id, project_id=project_id, label=body.label)
    )


async def managed_webhook(
    webhook_id: str, who: Principal, webhooks: WebhookService, overview: OverviewService
) -> WebhookView:
    """Return a webhook that the key may manage. Raise NotFound for any other."""
    require_right(who, Right.CHANGE)
    view = await webhooks.get(webhook_id)
    owner = view.project_id if view.run_id is None else (await overview.owner_of(view.run_id)).project_id
    if who.project_id not in (None, owner):
        raise NotFound(f"there is no webhook {webhook_id!r}", param="webhook")
    return view
