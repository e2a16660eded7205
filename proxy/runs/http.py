"""Authorisation of requests whose path names a run."""

from __future__ import annotations

from fastapi import Request

from proxy.auth.access import Principal, Right, covers, require_right, require_run, unknown_run
from proxy.auth.http import principal
from proxy.errors import NotFound
from proxy.http.services import service
from proxy.runs.service import RunDirectory, RunView


async def trained_run(request: Request, name_or_id: str) -> RunView:
    """Return the run that the path names, as `trainers_run` does. Raise RunArchived if nothing is trained in it."""
    run = await trainers_run(request, name_or_id)
    run.refuse_archived()
    return run


async def trainers_run(request: Request, name_or_id: str, right: Right = Right.TRAIN) -> RunView:
    """Return the run that the path names, for a key that has the right in it.

    Raise AuthenticationFailed without a valid key, PermissionDenied without the right, NotFound for a run that the
    key may not know of.
    """
    return await permitted_run(service(request, RunDirectory), await principal(request), right, name_or_id)


async def permitted_run(runs: RunDirectory, who: Principal, right: Right, name_or_id: str) -> RunView:
    """Return a run in which the key has the right. Raise PermissionDenied or NotFound."""
    require_right(who, right)
    if who.run_id is None:
        run = await runs.by_name_or_id(name_or_id)
        require_run(who, right, run, name_or_id)
        return run
    # Found by the key and not by the path: a run whose name is the id of this one must not stand in its way.
    own = await runs.by_id(who.run_id)
    if name_or_id not in (own.id, own.name):
        raise unknown_run(name_or_id)
    return own


async def permitted_data(runs: RunDirectory, who: Principal, right: Right, run_id: str, missing: str) -> RunView:
    """Return the run of a session or turn, for a key that has the right in it. Raise PermissionDenied, or NotFound
    with the message `missing`."""
    require_right(who, right)
    run = await runs.by_id(run_id)
    if not covers(who, run):
        raise NotFound(missing)
    return run
