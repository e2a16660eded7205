"""Gates, evaluations and held sessions over HTTP. {run} is a name or an id.

    GET    /api/v1/runs/{run}/versions/gates                {"versions": [VersionFindings…]}: the newest with findings
    GET    /api/v1/runs/{run}/versions/{version}/gates      VersionFindings: what its gates have found, with evidence
    GET    /api/v1/runs/{run}/versions/{version}/evaluations/{suite}   EvaluationView: the results at a suite
    POST   /api/v1/runs/{run}/versions/{version}/evaluations/{suite}   {"results": [{"task", "reward", "attempt"?,
                                                            "session_id"?}…]} → EvaluationView; the same attempt again
                                                            replaces its result
    GET    /api/v1/runs/{run}/versions/evaluations/secret   {"secret"}: signs the requests to `evaluation.url`
    GET    /api/v1/runs/{run}/versions/holds                {"holds": [HoldView…]}
    POST   /api/v1/runs/{run}/versions/{version}/hold       {"reason", "key_id" or "share"} → HoldView
    POST   /api/v1/runs/{run}/versions/holds/{hold}/release {"reason"} → {"holds": […]}

Reading needs the right `READ_TRAINING`, everything else `CHANGE` (`auth/access.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field, StringConstraints

from proxy.auth.access import Right
from proxy.contract.policy import MAX_VERSION
from proxy.gates.evaluator import Evaluator
from proxy.gates.holds import VersionHolds
from proxy.gates.results import ResultsBody
from proxy.gates.service import GateService
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trainers_run
from proxy.versions.steering_endpoints import ReasonBody, changed_run, decision_of

router = APIRouter(prefix="/api/v1/runs/{run}/versions", tags=["versions"], route_class=StrictRoute)

_MOST_VERSIONS = 100

Version = Annotated[int, Path(ge=0, le=MAX_VERSION)]
Suite = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class HoldBody(ReasonBody):
    """Keep new sessions on a version: those that the key `key_id` begins, or a `share` of all."""

    key_id: Annotated[str, StringConstraints(min_length=1, max_length=40)] | None = None
    share: Annotated[float, Field(gt=0.0, le=0.5, allow_inf_nan=False)] | None = None


@router.get("/gates")
async def gates(
    request: Request, run: str, limit: Annotated[int, Query(ge=1, le=_MOST_VERSIONS)] = 20
) -> JSONResponse:
    """Return the newest versions about which gates, or the watch over the serving version, have found something."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    found = await service(request, GateService).newest_findings(of_run, limit)
    return JSONResponse({"versions": msgspec.to_builtins(found)})


@router.get("/evaluations/secret")
async def secret(request: Request, run: str) -> JSONResponse:
    """Show the secret that signs the requests to the run's evaluator."""
    of_run = await trainers_run(request, run, Right.CHANGE)
    return JSONResponse({"secret": service(request, Evaluator).secret(of_run)})


@router.get("/holds")
async def holds(request: Request, run: str) -> JSONResponse:
    """Return the holds of a run, oldest first."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    found = await service(request, VersionHolds).list_(of_run)
    return JSONResponse({"holds": msgspec.to_builtins(found)})


@router.post("/holds/{hold}/release", openapi_extra=described(ReasonBody, answers={200: "The remaining holds."}))
async def release(request: Request, run: str, hold: Annotated[str, Path(max_length=40)]) -> JSONResponse:
    """Let the held sessions be answered by the serving version again."""
    of_run, body = await changed_run(request, run, ReasonBody)
    held = service(request, VersionHolds)
    await held.release(of_run, hold, await decision_of(request, body))
    return JSONResponse({"holds": msgspec.to_builtins(await held.list_(of_run))})


@router.get("/{version}/gates")
async def version_gates(request: Request, run: str, version: Version) -> JSONResponse:
    """Return what the gates have found about a version, with the evidence."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    return _answer(await service(request, GateService).findings(of_run, version))


@router.get("/{version}/evaluations/{suite}")
async def evaluation(request: Request, run: str, version: Version, suite: Suite) -> JSONResponse:
    """Return the results of a version at a suite of tasks."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    return _answer(await service(request, GateService).evaluation(of_run, version, suite))


@router.post(
    "/{version}/evaluations/{suite}", openapi_extra=described(ResultsBody, answers={200: "All results at the suite."})
)
async def add_results(request: Request, run: str, version: Version, suite: Suite) -> JSONResponse:
    """Add results of a version at a suite of tasks, for its gate `evaluation`."""
    of_run, body = await changed_run(request, run, ResultsBody)
    results = [result.model_dump() for result in body.results]
    return _answer(await service(request, GateService).add_results(of_run, version, suite, results))


@router.post("/{version}/hold", openapi_extra=described(HoldBody, answers={200: "The hold."}))
async def hold(request: Request, run: str, version: Version) -> JSONResponse:
    """Keep the sessions that a key begins from now on, or a share of all, on a version while others move on."""
    of_run, body = await changed_run(request, run, HoldBody)
    decision = await decision_of(request, body)
    held = service(request, VersionHolds)
    return _answer(await held.hold(of_run, version, decision, key_id=body.key_id, share=body.share))


def _answer(found: Any) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(found))
