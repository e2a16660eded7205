"""The reward ledger over HTTP.

GET    /api/v1/rewards                         RewardPage; filters below
GET    /api/v1/runs/{run}/rewards              RewardPage of the run; the same filters
GET    /api/v1/runs/{run}/rewards/revised      RevisedPage
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from proxy.auth.access import Right, is_scoped, require_right
from proxy.errors import InvalidRequest
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, readable_run
from proxy.overview.rewards.views import RewardFilter

router = APIRouter(prefix="/api/v1", route_class=StrictRoute)


def _filter(
    session: str | None = None,
    turn: str | None = None,
    name: str | None = None,
    source: str | None = None,
    since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    after_training: bool | None = None,
) -> RewardFilter:
    """`session` is an id or, within a run, the client's own name; `since` is in seconds since the epoch."""
    return RewardFilter(
        session=session, turn=turn, name=name, source=source, since=since, after_training=after_training
    )


Wanted = Annotated[RewardFilter, Depends(_filter)]


@router.get("/rewards")
async def all_rewards(
    who: Who,
    overview: Overview,
    wanted: Wanted,
    run: str | None = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List ledger entries, newest first, of the given run, of a run key's own run, or of all runs. The key of a
    project must give the run."""
    require_right(who, Right.READ)
    asked = run or who.run_id
    if asked is None and is_scoped(who):
        raise InvalidRequest("a key of a project lists the rewards of one run at a time: give `run`", param="run")
    run_id = None if asked is None else await readable_run(asked, who, overview)
    return json_answer(await overview.ledger.page(run_id, wanted, cursor=cursor, limit=limit))


@router.get("/runs/{run}/rewards")
async def rewards(
    run: str, who: Who, overview: Overview, wanted: Wanted, cursor: str | None = None, limit: Limit = 50
) -> Response:
    """List the ledger entries of a run, newest first."""
    run_id = await readable_run(run, who, overview)
    return json_answer(await overview.ledger.page(run_id, wanted, cursor=cursor, limit=limit))


@router.get("/runs/{run}/rewards/revised")
async def revised(run: str, who: Who, overview: Overview, cursor: str | None = None, limit: Limit = 50) -> Response:
    """List trained sessions whose rewards changed after the training, the last revised first."""
    run_id = await readable_run(run, who, overview)
    return json_answer(await overview.ledger.revised(run_id, cursor=cursor, limit=limit))
