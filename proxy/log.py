"""Logging, set up once per process: structlog, for this project and for libraries that use the standard library.

Logs go to standard error: readable lines on a terminal, otherwise one JSON object per line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

import structlog

from proxy.contract.visible import visible_values

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is being answered; every line logged during it carries the id."""


def configure(level: str) -> None:
    """Set up logging; `level` is debug, info, warning or error. A second call replaces the set-up of the first."""
    shared: list[Any] = [
        _of_request,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(sys.stderr.isatty())],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "alembic"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _of_request(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    of = request_id.get()
    if of is not None:
        event["request_id"] = of
    return event


def logger(name: str) -> Any:
    """Return a logger that binds nothing before its first use, so that modules may create one at import."""
    return structlog.stdlib.get_logger(name)


def _rendering(for_people: bool) -> list[Any]:
    if for_people:
        # Tracebacks become text before `visible_values` sees the event: exceptions quote what clients sent.
        console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [structlog.processors.format_exc_info, visible_values, console]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
