"""`base-rl engines …`: list, add, drain, resume and remove engines."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from proxy.cli.asking import ask_and_show
from proxy.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, Config, DataDir, Url, errors, finish, out

engines_app = typer.Typer(no_args_is_help=True, help="The inference engines that all proxies of a store share.")

_HEADINGS = ("engine", "state", "serves", "calls", "tokens", "only for", "from", "seen", "base model", "address")

EngineArgument = Annotated[str, typer.Argument(help="The engine's name, as in `base-rl engines list`.")]


class AddedKind(StrEnum):
    SGLANG = "sglang"
    EMBEDDED = "embedded"


@engines_app.command("list")
def engines_list(
    data_dir: DataDir = DEFAULT_DATA_DIR, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """List engines with their states, what they serve, and their load."""
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.engines(), _print_table, as_json=as_json)


@engines_app.command("add")
def engines_add(
    name: Annotated[str, typer.Argument(help="A name for the engine.")],
    address: Annotated[str, typer.Argument(help="Its address, which every proxy must reach: http://HOST:PORT.")],
    model: Annotated[
        str | None, typer.Option(help="Its base model; default: that of --run, or the one that it reports.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The one run that it serves; default: any run of its base model.")
    ] = None,
    kind: Annotated[AddedKind, typer.Option(help="What the engine is.")] = AddedKind.SGLANG,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Add a running engine, without a restart of any proxy.

    Start it first, and wait until it is ready: it is asked for its model, tokenizer and context length, and refused
    here if they do not fit. Every proxy of the store begins to use it within `engine.health_interval_seconds`. An
    address such as 127.0.0.1 is used only by proxies on the machine of the one that is asked.
    """
    # The proxy may run in another directory, so a directory is sent by its absolute path.
    directory = None if model is None else Path(model).expanduser()
    base = str(directory.resolve()) if directory is not None and directory.is_dir() else model
    body = {"name": name, "url": address, "kind": kind.value, "base_model": base, "run": run}
    ask_and_show((data_dir, url, api_key), lambda base_rl: base_rl.add_engine(body), _print_engine, as_json=as_json)


@engines_app.command("serve")
def engines_serve(
    name: Annotated[str, typer.Argument(help="A name for the engine, of its own.")],
    config: Config = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, which proxies must reach; default: the one towards the proxy."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; default: a free one.")] = None,
    run: Annotated[
        str | None, typer.Option(help="The one run that it serves; default: any run of its base model.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for the calls under way when it is asked to end.")
    ] = 60.0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Data directory of a base-rl on this machine; default: [server] data_dir.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Start the configured engine on this machine and add it to the pool of a base-rl, until Ctrl-C.

    For engines on other machines than the proxy's. `[engine]` and `[run] model` of the configuration say what is
    started. At the end it is drained and removed; `base-rl engines remove` ends it from elsewhere. An engine that
    dies or hangs is started again. Engines have no keys of their own: let only proxies reach the port.
    """
    from proxy.cli.cluster.serving import ServeOptions, serve

    options = ServeOptions(name=name, config=config, host=host, port=port, run=run, drain_seconds=drain_seconds)
    finish(lambda: asyncio.run(serve(options, (data_dir, url, api_key))))


@engines_app.command("scale")
def engines_scale(
    run: Annotated[str, typer.Argument(help="The run whose engines `base-rl up --ray` places.")],
    number: Annotated[int, typer.Argument(min=1, help="How many engines there should be.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change how many engines of a run are on its Ray cluster.

    `base-rl up --ray` notices it within seconds. New engines are placed where there is room and join the pool. Those
    that are too many, the last ones first, take no new calls, let those under way end, and leave the pool. With
    `[ray] max_engines`, the rule about load goes on from that number. The next start of `up` places
    `[engine] replicas`.
    """

    def ask() -> int:
        from proxy.cli.cluster.ray.scaling import WantedEngines

        WantedEngines(data_dir, run).ask(number)
        out.print(f"{run}: {number} engines are asked for; `base-rl engines list` shows them come and go")
        return 0

    finish(ask)


@engines_app.command("drain")
def engines_drain(
    engine: EngineArgument,
    force: Annotated[bool, typer.Option("--force", help="Even if a run is then without an engine.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Send no new calls to an engine, and let those under way end.

    Its state is `draining` until all of them have ended in every proxy, then `drained`: it can be stopped, restarted
    or removed. It stays drained over restarts of the proxies until `base-rl engines resume`.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.switch_engine(engine, "drain", force=force),
        _print_engine,
        as_json=as_json,
    )


@engines_app.command("resume")
def engines_resume(
    engine: EngineArgument,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Use a drained engine again. It takes calls once it has loaded the newest version."""
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.switch_engine(engine, "resume"),
        _print_engine,
        as_json=as_json,
    )


@engines_app.command("remove")
def engines_remove(
    engine: EngineArgument,
    force: Annotated[bool, typer.Option("--force", help="Even if it is not drained.")] = False,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Take a drained engine out of the pool for good. The engine's process goes on.

    An engine of the configuration is refused, because the next start would add it again: take it out there.
    """
    ask_and_show(
        (data_dir, url, api_key),
        lambda base_rl: base_rl.remove_engine(engine, force=force),
        lambda _: out.print(f"the engine {engine} is removed"),
    )


def _print_engine(engine: dict[str, Any]) -> None:
    _print_table([engine])
    if engine["problem"] is not None:
        errors.print(engine["problem"], soft_wrap=True)


def _print_table(engines: list[dict[str, Any]]) -> None:
    from proxy.admin.formatting import ago
    from proxy.admin.formatting import model as short_model

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading)
    for one in engines:
        table.add_row(
            one["name"],
            one["state"],
            ", ".join(name if at is None else f"{name}@{at}" for name, at in one["versions"].items()),
            str(one["calls"]),
            str(one["outstanding_tokens"]),
            one["run"] or "",
            one["origin"],
            "never" if one["seen_at"] is None else ago(one["seen_at"], time.time()),
            short_model(one["base_model"]),
            one["url"],
        )
    out.print(table)
