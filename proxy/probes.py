"""Probes for orchestrators and for Prometheus: /healthz, /readyz and /metrics. They take no key."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from proxy.errors import StoreUnavailable
from proxy.http.services import service
from proxy.metrics import CONTENT_TYPE, Stored
from proxy.services import Services

router = APIRouter(tags=["health"])


@router.get("/", include_in_schema=False)
async def front_door() -> RedirectResponse:
    """Send a browser that opens the bare address to the admin page."""
    return RedirectResponse("/admin", status_code=303)


@router.get("/healthz")
async def healthz() -> JSONResponse:
    """Answer 200 while the process runs. Neither the store nor the engine is checked: see /readyz."""
    return JSONResponse({"status": "ok", "service": "base-rl"})


@router.get("/readyz", openapi_extra={"responses": {"503": {"description": "What is missing."}}})
async def readyz(request: Request) -> JSONResponse:
    """Answer 200 if model calls of at least one run would be served now: the store takes writes, and an engine is up
    and has a version of the run. Otherwise 503, and `missing` names what is absent; the health view lists the runs
    that are not served. `serving_version` is that of the first configured run. Where calls are served while the store
    is away, `unrecorded` has the reason."""
    services = service(request, Services)
    missing: dict[str, str] = {}
    unrecorded: dict[str, str] = {}
    try:
        await services.database.check_writable()
    except StoreUnavailable as error:
        if services.settings.database.when_unavailable == "serve":
            unrecorded["unrecorded"] = error.message
        else:
            missing["store"] = error.message
    if (problem := services.engines.problem) is not None:
        missing["engine"] = problem
    serving = services.engines.serving(services.served.first_run.id)
    answer = {"ready": not missing, "missing": missing, "serving_version": serving, **unrecorded}
    return JSONResponse(answer, 503 if missing else 200)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus. Unauthenticated, like the probes: they are counts and run names, without
    content. Where the proxy listens beyond loopback, let the gateway decide who may read them."""
    services = service(request, Services)
    stored = Stored()
    # While the store is away, the figures that this process counted itself are still worth reading.
    with suppress(StoreUnavailable):
        jobs = await services.jobs.kinds()
        stored = Stored(
            sessions=await services.overview.sessions_by_training(),
            revised=await services.sessions.count_revised(),
            steps=await services.overview.last_steps(),
            jobs={(kind.kind, state): count for kind in jobs for state, count in kind.counts()},
            oldest_jobs={kind.kind: kind.oldest_seconds for kind in jobs},
        )
    return Response(services.metrics.render(stored), media_type=CONTENT_TYPE)
