"""Routes that refuse unknown query parameters, for the operating API and the admin page.

Otherwise a misspelt filter (`?statr=open`) would be ignored, and the unfiltered list would look like the answer.
Model endpoints accept unknown parameters, because clients made for other servers add their own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_args, get_origin

from fastapi import Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.responses import Response
from fastapi.routing import APIRoute

from proxy.errors import InvalidRequest

_SHOWN = 40  # characters of a client's parameter that an error quotes


class StrictRoute(APIRoute):
    """A route that raises InvalidRequest for a query parameter that is unknown, or given twice and not a list."""

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
    """Return whether a type is a collection or a union with one, such as `list[str] | None`."""
    return get_origin(annotation) in (list, tuple, set) or any(_is_list(part) for part in get_args(annotation))


def _check(request: Request, known: dict[str, bool]) -> None:
    """Check the query against `known`, which maps each parameter to whether it may be given several times."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
        if name not in known:
            accepted = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(f"unknown query parameter {shown!r}: this endpoint takes {accepted}", param=shown)
        if name in seen and not known[name]:
            raise InvalidRequest(f"the query parameter {shown!r} is given twice: send it once", param=shown)
        seen.add(name)
