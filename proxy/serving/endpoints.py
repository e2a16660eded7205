"""Engines over HTTP, under /api/v1, for admin keys.

GET    /api/v1/engines                     {"engines": [EngineView…]}, oldest first
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from proxy.auth.http import require
from proxy.auth.service import PrincipalKind
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Who, json_answer
from proxy.overview.views import EngineList
from proxy.serving.directory import EngineDirectory

router = APIRouter(prefix="/api/v1", tags=["engines"], route_class=StrictRoute)


def directory_of(request: Request) -> EngineDirectory:
    return service(request, EngineDirectory)


Directory = Annotated[EngineDirectory, Depends(directory_of)]


@router.get("/engines")
async def engines(who: Who, directory: Directory) -> Response:
    """Return all engines, oldest first."""
    require(who, PrincipalKind.ADMIN)
    return json_answer(EngineList(engines=directory.list_()))
