"""`base-rl proxy`: the proxy alone, in one process or in several that share a port and a database.

The workers share nothing but the store, like proxies on several machines. Each binds the port itself (SO_REUSEPORT),
and the kernel spreads connections by their addresses: with one shared socket, the first worker to wake up would take
all connections of a burst.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from proxy import machine
from proxy.cli.addresses import claimed_port
from proxy.cli.console import Refused, out
from proxy.cli.local_keys import load_or_make
from proxy.cli.operations import Operations
from proxy.cli.signals import end_on_signals
from proxy.cli.stack import AlreadyRunning, address_recorded, local_url, only_one
from proxy.cli.supervisor import Part, Supervisor
from proxy.private_files import make_directory
from proxy.settings import Settings, as_environment, load_settings

# Seconds beyond the grace period, for recording the calls in flight: it takes milliseconds unless the disk hangs.
_STOP_S = 5.0
_READY_POLL_S = 0.1
_MIB = 1 << 20


class ProxyOptions(msgspec.Struct, frozen=True, kw_only=True):
    config: Path | None
    overrides: dict[str, dict[str, object]]
    workers: int
    own_ports: int | None


async def run_proxy(options: ProxyOptions) -> int:
    """Run the workers until a signal. Raises Refused for several workers on SQLite, NoFreePort, AlreadyRunning,
    PartFailed."""
    settings = load_settings(options.config, options.overrides)
    _check(settings, options.workers)
    end_on_signals()
    data_dir = settings.server.data_dir.resolve()
    make_directory(data_dir)
    with ExitStack() as stack:
        leads = stack.enter_context(_leads(data_dir, settings))
        port = stack.enter_context(claimed_port(settings.server.host, settings.server.port))
        settings = settings.model_copy(
            update={"server": settings.server.model_copy(update={"port": port, "data_dir": data_dir})}
        )
        # Bound without listening, so that nobody else takes the port while a worker is restarted.
        stack.enter_context(machine.shared_socket(settings.server.host, port))
        parts = [_worker(settings, options, number) for number in range(1, options.workers + 1)]
        url = local_url(settings)
        if leads:
            stack.enter_context(address_recorded(data_dir, url, settings.run.name))
        log_dir = data_dir / "logs"
        if not leads:
            # Workers of all proxies have the same names, so those of one machine and port have a directory.
            log_dir /= f"{socket.gethostname()}-{port}"
        async with Supervisor(
            parts, log_dir, lambda part, what: out.print(f"{part:<8} {what}"), together=True
        ) as supervisor:
            async with Operations(url, None) as operations:
                while not await operations.alive():
                    supervisor.raise_for_failure()
                    await asyncio.sleep(_READY_POLL_S)
            out.print(f"{options.workers} worker(s) answer at {url}, logs in {log_dir}", soft_wrap=True)
            await supervisor.wait_for_failure()
    return 0


def _check(settings: Settings, workers: int) -> None:
    if workers > 1 and settings.database_url.startswith("sqlite"):
        raise Refused(
            f"{workers} workers need PostgreSQL: SQLite lets one process write at a time, so they would only wait for"
            " each other. Set database.url to postgresql://user:password@host:5432/database, or omit --workers"
        )


@contextmanager
def _leads(data_dir: Path, settings: Settings) -> Iterator[bool]:
    """Yield whether no other base-rl uses the data directory. Proxies on one PostgreSQL may share it, because keys
    are made with the secret in it; on SQLite AlreadyRunning is raised."""
    with ExitStack() as stack:
        try:
            stack.enter_context(only_one(data_dir))
        except AlreadyRunning:
            if settings.database_url.startswith("sqlite"):
                raise
            yield False
        else:
            yield True


def _worker(settings: Settings, options: ProxyOptions, number: int) -> Part:
    argv = [sys.executable, "-m", "proxy"]
    argv += ["--config", str(options.config.resolve())] if options.config is not None else []
    argv += ["--engines-join", "--shared-port"]
    argv += ["--own-port", str(options.own_ports + number - 1)] if options.own_ports is not None else []
    server = settings.server
    if server.max_bodies_mib is None:
        # The default is a share of the machine's memory, which the workers divide among them.
        most = max(1, machine.default_body_bytes() // options.workers // _MIB)
        server = server.model_copy(update={"max_bodies_mib": most})
    return Part(
        name=f"proxy-{number}" if options.workers > 1 else "proxy",
        argv=tuple(argv),
        env={**as_environment(settings.model_copy(update={"server": server})), **_bootstrap(settings)},
        stop_seconds=server.stop_grace_seconds + _STOP_S,
    )


def _bootstrap(settings: Settings) -> dict[str, str]:
    """Return the variables with the data directory's keys, which are made if no keys are configured."""
    given = settings.bootstrap
    if given.admin_key or given.run_key or given.trainer_key:
        return {}
    keys = load_or_make(settings.server.data_dir)
    return {
        "BASE_RL_BOOTSTRAP__ADMIN_KEY": keys.admin_key,
        "BASE_RL_BOOTSTRAP__RUN_KEY": keys.run_key,
        "BASE_RL_BOOTSTRAP__TRAINER_KEY": keys.trainer_key,
    }
