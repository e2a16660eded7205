"""The proxy's process: its command line, its sockets, its exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import socket
import sys
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn

from proxy import log, machine
from proxy.app import Application, create_app
from proxy.contract.visible import visible
from proxy.errors import StoreDamaged, StoreUnavailable
from proxy.http.connections import BoundedConnection, Connections, connections_within
from proxy.interpreter import settle_interpreter
from proxy.settings import ConfigurationError, Settings, load_settings

# Seconds beyond the grace period that a connection may take to close; then its task is cancelled.
_LAST_RESORT_SECONDS = 3

DATABASE_AWAY = 75
"""Exit status EX_TEMPFAIL of sysexits.h: the same start may succeed later (`proxy/cli/supervisor.py`)."""

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed in the moment it is used."""


def main(arguments: list[str] | None = None) -> int:
    """Serve, and return the exit status: 2 for a fault that a restart does not fix (a wrong configuration, a damaged
    store), `DATABASE_AWAY` for a database that does not answer. The last line of standard error has the reason."""
    parser = argparse.ArgumentParser(prog="python -m proxy", description="The base-rl proxy.")
    parser.add_argument("--config", type=Path, help="TOML file; BASE_RL_SECTION__KEY in the environment overrides it")
    parser.add_argument("--engines-join", action="store_true", help="start without engines, which are added later")
    parser.add_argument(
        "--shared-port", action="store_true", help="let other processes of `base-rl proxy` listen too"
    )
    parser.add_argument("--own-port", type=int, help="a second port, which only this process listens on")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(options.config)
        log.configure(settings.server.log_level)
        app = create_app(settings, engines_join=options.engines_join)
    except ConfigurationError as error:
        return _refuse(error)
    machine.raise_descriptor_limit()
    server = _Server(app, settings)
    logging.getLogger("uvicorn.error").addFilter(partial(_is_worth_a_line, app))
    try:
        server.run(_sockets(settings, shared_port=options.shared_port, own_port=options.own_port))
    except KeyboardInterrupt:
        return 0
    except SystemExit:
        if app.startup_error is None:
            raise
    if app.startup_error is not None:
        return _refuse(app.startup_error)
    return 0


def _sockets(settings: Settings, *, shared_port: bool, own_port: int | None) -> list[socket.socket] | None:
    """Return the sockets to listen on; None for the configured address alone."""
    if not shared_port and own_port is None:
        return None
    host, port = settings.server.host, settings.server.port
    shared = machine.shared_socket(host, port)
    return [shared] if own_port is None else [shared, machine.shared_socket(host, own_port)]


class _Server(uvicorn.Server):
    """uvicorn's server with bounded connections. Before it waits for open connections, it has the application end the
    requests that would not end by themselves."""

    def __init__(self, app: Application, settings: Settings) -> None:
        self._app = app
        most = connections_within(settings.server.max_connections, machine.descriptor_limit())
        connections = Connections(settings.server, app.metrics, most=most)
        self._grace = settings.server.stop_grace_seconds
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.server.host,
                port=settings.server.port,
                # uvicorn only calls this, as it would call a class of its own; its annotation demands a class.
                http=cast("type[BoundedConnection]", partial(BoundedConnection, connections=connections)),
                access_log=False,
                server_header=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.server.stop_grace_seconds) + _LAST_RESORT_SECONDS,
                lifespan="on",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle_interpreter()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.begin_stop()
        cutting = asyncio.create_task(self._cut_generations())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_generations(self) -> None:
        """End the calls in flight after the grace period. Each is recorded as truncated with the tokens produced so
        far, and its client receives the end of its stream."""
        await asyncio.sleep(self._grace)
        await self._app.services.calls.aclose()


def _is_worth_a_line(app: Application, record: logging.LogRecord) -> bool:
    """Return False for the traceback of an error that the last line reports, and for uvicorn's line about each
    malformed request: `Connections` counts those, and logs a bounded number."""
    message = record.getMessage()
    if message == "Invalid HTTP request received.":
        return False
    return app.startup_error is None or not message.startswith("Traceback")


def _refuse(error: ConfigurationError | StoreUnavailable) -> int:
    sys.stderr.write(f"base-rl: {visible(str(error))}\n")
    return 2 if isinstance(error, ConfigurationError | StoreDamaged) else DATABASE_AWAY
