"""`python -m proxy [--config FILE]`: serves until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from proxy import log
from proxy.app import create_app
from proxy.settings import ConfigurationError, Settings, load_settings

GRACE_SECONDS = 15
"""How long open streams may go on once the proxy was told to stop."""


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 2 for a configuration that is wrong, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m proxy", description="The base-rl proxy.")
    parser.add_argument("--config", type=Path, help="TOML file; BASE_RL_SECTION__KEY in the environment overrides it")
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(options.config)
        log.configure(settings.server.log_level)
        app = create_app(settings)
    except ConfigurationError as error:
        return _refuse(error)
    server = uvicorn.Server(server_config(app, settings))
    with suppress(KeyboardInterrupt):
        server.run()
    if app.state.startup_error is not None:
        return _refuse(app.state.startup_error)
    return 0 if server.started else 3


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.server.host,
        port=settings.server.port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
    )


def _refuse(error: ConfigurationError) -> int:
    sys.stderr.write(f"base-rl: {error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
