"""The run that a request's path names, for the keys that may act on it."""

from __future__ import annotations

from fastapi import Request

from proxy.auth.http import principal, require
from proxy.auth.service import PrincipalKind
from proxy.errors import PermissionDenied
from proxy.http.services import service
from proxy.runs.service import RunDirectory, RunView


async def trainers_run(request: Request, name_or_id: str) -> RunView:
    """The run that the request's key may train.

    Raises AuthenticationFailed, PermissionDenied for other keys than its trainer's or an admin's, NotFound.
    """
    who = await principal(request)
    require(who, PrincipalKind.TRAINER, PrincipalKind.ADMIN)
    run = await service(request, RunDirectory).by_name_or_id(name_or_id)
    if who.kind is PrincipalKind.TRAINER and who.run_id != run.id:
        raise PermissionDenied("this key trains another run")
    return run
