"""Authorisation of requests whose path names a run."""

from __future__ import annotations

from fastapi import Request

from proxy.auth.http import principal, require
from proxy.auth.service import PrincipalKind
from proxy.errors import PermissionDenied
from proxy.http.services import service
from proxy.runs.service import RunDirectory, RunView


async def trained_run(request: Request, name_or_id: str) -> RunView:
    """Return the run that the path names, as `trainers_run` does. Raise RunArchived if nothing is trained in it."""
    run = await trainers_run(request, name_or_id)
    run.refuse_archived()
    return run


async def trainers_run(request: Request, name_or_id: str) -> RunView:
    """Return the run that the path names, for its trainer key or an admin key.

    Raise AuthenticationFailed without a valid key, PermissionDenied for any other key, NotFound without such a run.
    """
    who = await principal(request)
    require(who, PrincipalKind.TRAINER, PrincipalKind.ADMIN)
    run = await service(request, RunDirectory).by_name_or_id(name_or_id)
    if who.kind is PrincipalKind.TRAINER and who.run_id not in (None, run.id):
        raise PermissionDenied(f"this trainer key belongs to another run than {run.name!r}")
    return run
