"""`base-rl proxy`: the proxy alone, for engines and trainers that run elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from proxy.cli.console import Config, finish


def proxy(
    config: Config = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share the port; more than one needs PostgreSQL.")
    ] = 1,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 8080.")] = None,
    own_ports: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Each worker also listens on a port of its own, from this one on, for /metrics."
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Directory with keys, secret, weights and logs.")] = None,
) -> None:
    """Start the proxy alone, in the foreground, until Ctrl-C.

    Engines join by `[engines.NAME]` tables, `base-rl engines add` or `base-rl engines serve`; trainers by `base-rl
    train`. Any number of workers, on any number of machines, may share one PostgreSQL: a session goes on at
    whichever of them its next call arrives. Each has memory, database connections and metrics of its own, so give
    Prometheus the --own-ports. A worker that dies is restarted while the others answer.
    """
    from proxy.cli.cluster.workers import ProxyOptions, run_proxy

    given = {"host": host, "port": port, "data_dir": data_dir}
    server: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    options = ProxyOptions(config=config, overrides={"server": server}, workers=workers, own_ports=own_ports)
    finish(lambda: asyncio.run(run_proxy(options)))
