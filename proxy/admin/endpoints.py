"""All pages under /admin, with their static files."""

from __future__ import annotations

from proxy.admin.pages import (
    board,
    engines,
    events,
    files,
    jobs,
    judges,
    keys,
    projects,
    review,
    run_forms,
    runs,
    sessions,
    signing_in,
    versions,
    webhook_forms,
    webhooks,
)
from proxy.admin.pages.common import page_router

router = page_router()

# `files` is last: it answers every address that no page before it has. `webhook_forms` is before `webhooks`, which
# refuses changes that it does not know.
for _pages in (
    signing_in,
    board,
    runs,
    versions,
    judges,
    run_forms,
    sessions,
    review,
    projects,
    keys,
    engines,
    jobs,
    webhook_forms,
    webhooks,
    events,
    files,
):
    router.routes.extend(_pages.router.routes)
