"""The services behind an application's endpoints, found by their type.

Wiring:     provide(app, sessions, feedback)
Endpoint:   await service(request, SessionService).create(…)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import FastAPI

_Service = TypeVar("_Service")


def provide(app: FastAPI, *services: object) -> None:
    """Let the endpoints of `app` use these services; one of a type that was provided before takes its place."""
    known: dict[type, object] = getattr(app.state, "services", {})
    # A new dictionary instead of a changed one: a request in flight sees all of the new services or none.
    app.state.services = {**known, **{type(each): each for each in services}}


def service(request: Mapping[str, Any], kind: type[_Service]) -> _Service:
    """Return the service of this type that the application of `request` (or of an ASGI scope) provides.

    Raises LookupError for a type that was never provided: a mistake in the wiring.
    """
    try:
        found: _Service = request["app"].state.services[kind]
    except (KeyError, AttributeError) as error:
        raise LookupError(f"the application provides no {kind.__name__}: give it to provide()") from error
    return found
