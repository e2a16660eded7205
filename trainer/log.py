"""Structured logs on standard error: readable lines on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from proxy.contract.visible import visible_values


def configure(level: str) -> None:
    """Configure logging; `level` is debug, info, warning or error. Calling it again replaces the configuration."""
    terminal = sys.stderr.isatty()
    rendering: list[Any] = (
        [
            structlog.processors.format_exc_info,
            visible_values,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
        if terminal
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # Writes a line and its end at once, because several ranks share the stream.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
