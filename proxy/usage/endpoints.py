"""Limits and their use over HTTP.

GET /api/v1/limits                      {"limits": [LimitsView…]}: of the projects, runs and keys that the key may see
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from proxy.auth.access import Right, require_right
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Who, json_answer
from proxy.usage.service import UsageService

router = APIRouter(prefix="/api/v1", tags=["limits"], route_class=StrictRoute)


@router.get("/limits")
async def limits(request: Request, who: Who) -> Response:
    """List limits, with what is used of their budgets. A run key sees those of its run and its own."""
    require_right(who, Right.READ)
    return json_answer({"limits": await service(request, UsageService).visible(who)})
