"""The static files of the pages, and the answer to addresses that have no page."""

from __future__ import annotations

from fastapi.responses import FileResponse, RedirectResponse, Response

from proxy.admin.pages.common import Guest, page_router
from proxy.admin.templating import content_hash, static_files
from proxy.errors import NotFound

router = page_router()

# Safe because a static address carries the hash of its content: a changed file has another address.
_FOREVER = "public, max-age=31536000, immutable"


@router.get("/static/{path:path}")
async def static(path: str, v: str = "") -> Response:
    """Serve a static file; browsers cache it for good under the address that carries its content's hash."""
    file = static_files().get(path)
    if file is None:
        raise NotFound("there is no such file")
    is_current = v == content_hash(path)
    return FileResponse(file, headers={"cache-control": _FOREVER if is_current else "no-cache"})


@router.get("/{rest:path}")
async def nowhere(rest: str, _visitor: Guest) -> Response:
    if not rest:
        return RedirectResponse("/admin", status_code=303)
    raise NotFound(f"there is no page at /admin/{rest}")
