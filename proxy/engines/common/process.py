"""The process of an engine: its log, its threads' stacks, and its HTTP server."""

from __future__ import annotations

import argparse
import gc
import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add `--host` and `--port`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (default %(default)s)")


def prepare() -> None:
    """Set up the log and the stack size. Call it before the first thread starts."""
    from proxy.engines.common.grammar_compiler import STACK_BYTES

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    threading.stack_size(STACK_BYTES)


def serve(app: ASGIApp, *, host: str, port: int) -> None:
    """Serve until a signal ends the process; running requests then have five seconds."""
    # Imported here: `--help` should not wait for it.
    import uvicorn

    # Everything loaded by now lives as long as the process, so the collector need not visit it again.
    gc.collect()
    gc.freeze()
    uvicorn.run(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=5,
    )
