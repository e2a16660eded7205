"""`base-rl engines serve`: the options of an engine's host, and its course."""

from __future__ import annotations

from pathlib import Path

import msgspec

from proxy.cli.addresses import random_free_port
from proxy.cli.cluster.hosting import Bounds, EngineHost, HostedEngine, say
from proxy.cli.console import Refused, print_error, where
from proxy.cli.engine_plan import engine_plan
from proxy.cli.models import ModelNotUsable, resolve_model
from proxy.cli.operations import Operations, ProxyUnreachable
from proxy.cli.signals import end_on_signals
from proxy.cli.supervisor import WRONG_CONFIGURATION
from proxy.contract.addresses import address_towards
from proxy.settings import ConfigurationError, EngineKind, load_settings

_SAME_SIGNAL_S = 1.0
"""Far longer than Slurm and a batch script need to signal one process, and shorter than somebody's second Ctrl-C."""

ProxyPlace = tuple[Path | None, str | None, str | None]
"""The data directory of the proxy, its address and an admin key, as far as they are given."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    config: Path | None
    host: str | None
    port: int | None
    run: str | None
    drain_seconds: float


async def serve(options: ServeOptions, place: ProxyPlace) -> int:
    """Host the configured engine until it is removed at the proxy or a signal ends it, and return the exit status: 0,
    or 2 for a fault that another start does not mend, so that a scheduler does not try again.

    Raises PartFailed and ProxyUnreachable, as `EngineHost.run` does.
    """
    try:
        return await _serve(options, place)
    except (ConfigurationError, ModelNotUsable, Refused) as error:
        print_error(str(error))
        return WRONG_CONFIGURATION


async def _serve(options: ServeOptions, place: ProxyPlace) -> int:
    end_on_signals(same_within=_SAME_SIGNAL_S)
    settings = load_settings(options.config)
    if settings.engine.kind not in (EngineKind.EMBEDDED, EngineKind.SGLANG):
        raise Refused(
            f"engine.kind is {settings.engine.kind!r}, and only embedded and sglang can be started here; add an"
            " engine that runs already with `base-rl engines add`"
        )
    model = str(resolve_model(settings.run.model))
    # The proxy knows a base model by its directory, or by its Hugging Face id, whatever the engine reads it from.
    base_model = model if Path(settings.run.model).expanduser().is_dir() else settings.run.model
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"model": model})})
    data_dir, given_url, api_key = place
    url, key = where(data_dir or settings.server.data_dir, given_url, api_key)
    host = options.host or _own_address(url)
    port = options.port or random_free_port(host)
    engine = HostedEngine(
        name=options.name,
        plan=engine_plan(settings, port=port, host=host, seed=None),
        kind=settings.engine.kind,
        base_model=base_model,
        run=options.run,
    )
    bounds = Bounds(drain=options.drain_seconds)
    async with Operations(url, key) as operations:
        log_dir = settings.server.data_dir.resolve() / "logs"
        await EngineHost(engine, operations, log_dir=log_dir, bounds=bounds, say=say).run()
    return 0


def _own_address(proxy_url: str) -> str:
    """Return the address at which the proxy reaches this machine. Raises ProxyUnreachable."""
    try:
        return address_towards(proxy_url)
    except OSError as error:
        raise ProxyUnreachable(
            f"no way to the proxy at {proxy_url} ({error}): check --url, or name this machine's address with --host"
        ) from error
