"""The engines that the configuration names."""

from __future__ import annotations

import msgspec

from proxy.runs.service import resolved_model
from proxy.settings import ConfigurationError, EngineKind, Settings

FIRST_ENGINE = "engine"
"""Name of the engine of `[engine]`; its replicas are `engine-2`, `engine-3` and so on."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as it is configured. `run` is the name of the one run that it is dedicated to, if any. `origin` is
    `local` for an engine that `base-rl up` started, `configured` for any other."""

    name: str
    url: str
    base_model: str
    run: str | None = None
    kind: str = "sglang"
    origin: str = "configured"


def engine_specs(settings: Settings) -> list[EngineSpec]:
    """Return the engines of `[engine]`, its replicas included, and those of the `[engines.NAME]` tables.

    Where the configuration declares one run, the engines of `[engine]` are dedicated to it: further runs in the store
    may be remains of earlier configurations, and must not take its engine. An adapter run shares its engine, so
    nothing is dedicated to it. Raise ConfigurationError for two engines at one address, or for a table that does not
    say which model it has.
    """
    run, runs = settings.run, settings.runs
    engine = settings.engine
    is_local = engine.kind in tuple(EngineKind)
    own = [] if engine.url is None else [engine.url, *engine.replica_urls]
    specs = [
        EngineSpec(
            name=FIRST_ENGINE if number == 1 else f"{FIRST_ENGINE}-{number}",
            url=address,
            base_model=resolved_model(run.model),
            run=None if runs or run.weights == "adapter" else run.name,
            kind=engine.kind if is_local else "sglang",
            origin="local" if is_local else "configured",
        )
        for number, address in enumerate(own, start=1)
    ]
    for name, table in settings.engines.items():
        of_run = runs.get(table.run, run) if table.run is not None else run
        model = table.model or of_run.model
        specs.append(EngineSpec(name=name, url=table.url, base_model=resolved_model(model), run=table.run))
    addresses: dict[str, str] = {}
    for spec in specs:
        address = spec.url.rstrip("/")
        if address in addresses:
            raise ConfigurationError(
                f"engines.{spec.name}.url: {spec.url} is the address of the engine {addresses[address]!r} already;"
                " name each engine once"
            )
        addresses[address] = spec.name
    return specs
