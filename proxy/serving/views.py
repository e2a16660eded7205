"""Engines as operators see them: the store's row with the reports of every proxy that uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from proxy.contract.identifiers import RunId
from proxy.engines.sglang import public_address
from proxy.overview.views import EngineLeaseView, EngineView
from proxy.serving.member import PooledEngine
from proxy.serving.repository import EngineRecord, EngineReport


def engine_view(
    record: EngineRecord, reports: Sequence[EngineReport], run_names: Mapping[str, str], *, capacity: int
) -> EngineView:
    """Return the view of an engine. `reports` begins with that of this proxy if it uses the engine; `run_names` are
    the names of runs by id, `capacity` the number of generations that one proxy has there at once."""
    first = reports[0] if reports else None
    runs: dict[str, int | None] = {}
    for report in reports:
        for run_id, version in report.runs.items():
            name = run_names.get(run_id, run_id)
            runs[name] = version if runs.get(name) is None else runs[name]
    lease = None
    if record.lease_owner is not None and record.lease_until is not None:
        lease = EngineLeaseView(owner=record.lease_owner, until=record.lease_until)
    seen = [report.seen_at for report in reports if report.seen_at is not None]
    return EngineView(
        id=record.id,
        name=record.name,
        url=public_address(record.url),
        kind=record.kind,
        base_model=record.base_model,
        run=record.run,
        origin=record.origin,
        desired=record.desired,
        state=_state(record, reports),
        problem=None if first is None else first.problem,
        versions=runs,
        adapters=() if first is None else first.adapters,
        calls=sum(report.calls for report in reports),
        outstanding_tokens=sum(report.outstanding_tokens for report in reports),
        capacity=capacity,
        proxies=len(reports),
        lease=lease,
        created_at=record.created_at,
        seen_at=max(seen, default=None),
    )


def _state(record: EngineRecord, reports: Sequence[EngineReport]) -> str:
    if record.is_draining:
        return record.desired
    return reports[0].state if reports else "starting"


def engine_state(member: PooledEngine, serving: Callable[[RunId], int | None]) -> str:
    """Return the state of an engine as a proxy sees it. `serving` returns the version that new calls of a run get."""
    if member.problem is not None or (not member.controllers and member.is_answering is False):
        if not member.has_answered:
            return "starting"
        return "not_ready" if member.is_answering else "down"
    if not member.controllers:
        return "unused"
    is_newest = all(each.is_at(serving(run_id)) for run_id, each in member.controllers.items())
    return "ready" if is_newest else "behind"
