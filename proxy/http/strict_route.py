"""Routes of the operating API and the page: a query parameter that means nothing there is refused, not passed over.

A misspelt filter (`?statr=open`) would otherwise list everything and look like an answer. Model endpoints stay
lenient: clients of others add parameters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_args, get_origin

from fastapi import Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.responses import Response
from fastapi.routing import APIRoute

from proxy.errors import InvalidRequest

_SHOWN = 40


class StrictRoute(APIRoute):
    """Raises InvalidRequest for query parameters that the endpoint does not take, or that are given twice."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        fields = get_flat_params(self.dependant)
        known = {
            field.alias: _is_list(field.field_info.annotation)
            for field in fields
            if isinstance(field.field_info, params.Query)
        }

        async def answer(request: Request) -> Response:
            _check(request, known)
            return await handler(request)

        return answer


def _is_list(annotation: Any) -> bool:
    """Whether a type is that of a list, or of one among others (`list[str] | None`)."""
    return get_origin(annotation) in (list, tuple, set) or any(_is_list(part) for part in get_args(annotation))


def _check(request: Request, known: dict[str, bool]) -> None:
    """`known`: whether a parameter may be given several times."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
        if name not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise InvalidRequest(f"there is no query parameter {shown!r} here: {takes}", param=shown)
        if name in seen and not known[name]:
            raise InvalidRequest(f"the query parameter {shown!r} is given twice", param=shown)
        seen.add(name)
