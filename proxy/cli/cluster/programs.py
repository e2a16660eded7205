"""The two programs that every scheduler starts, and what they need: `base-rl engines serve`, and a rank of the
trainer."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.cli.console import Refused
from proxy.cli.local_keys import load
from proxy.settings import EngineKind, Settings
from proxy.settings.placement import PlacementSettings

TRAINER = "trainer"
ADMIN_KEY, TRAINER_KEY = "BASE_RL_ADMIN_KEY", "BASE_RL_TRAINER__API_KEY"


def serve_arguments(name: str, config: Path, url: str) -> list[str]:
    """Return the arguments of Python for an engine that joins the pool of the proxy at `url`."""
    return ["-m", "proxy.cli", "engines", "serve", name, "--config", str(config.resolve()), "--url", url]


def rank_arguments(module: str, config: Path, url: str) -> list[str]:
    """Return the arguments of Python for a rank that trains at the proxy at `url`. `module` reads its place among the
    ranks from the scheduler."""
    return ["-m", module, "--config", str(config.resolve()), "--set", f"proxy_url={url}"]


def proxy_address(settings: Settings) -> str:
    """Return the address at which nodes reach the proxy. Raises Refused."""
    if settings.server.public_url is None:
        raise Refused("server.public_url: set it to the address at which the nodes reach the proxy (`base-rl proxy`)")
    return settings.server.public_url


def check_engine(settings: Settings, scheduler: str) -> None:
    """Raise Refused unless the configured engine is one that a node can start."""
    kind = settings.engine.kind
    if kind not in (EngineKind.EMBEDDED, EngineKind.SGLANG):
        raise Refused(
            f"engine.kind is {kind!r}, and {scheduler} can start engines of the kinds embedded and sglang: set one of"
            " them in the configuration"
        )


def gpus_of_engine(settings: Settings, placement: PlacementSettings) -> int:
    if placement.engine_gpus is not None:
        return placement.engine_gpus
    return settings.engine.tensor_parallel if settings.engine.device == "cuda" else 0


def check_ranks(ranks: int | None, placement: PlacementSettings, section: str) -> int:
    """Return the number of ranks that the scheduler starts. Raises Refused if the trainer's configuration is for
    another number (`ranks`; None: any)."""
    started = placement.trainer_nodes * placement.trainer_ranks_per_node
    if ranks is not None and ranks != started:
        raise Refused(
            f"the trainer's configuration is for {ranks} processes, and {section}.trainer_nodes ×"
            f" {section}.trainer_ranks_per_node start {started}: make them equal"
        )
    return started


def keys_of_programs(data_dir: Path, admin_key: str | None, *, with_trainer: bool) -> dict[str, str]:
    """Return the variables with the keys of engines and trainer. Raises Refused if one is missing."""
    local = load(data_dir)
    admin = admin_key or (None if local is None else local.admin_key)
    trainer = os.environ.get(TRAINER_KEY) or (None if local is None else local.trainer_key)
    if admin is None or (trainer is None and with_trainer):
        raise Refused(
            f"no keys in {data_dir}: engines need an admin key ({ADMIN_KEY}) to join the pool, and the trainer a"
            f" trainer key of the run ({TRAINER_KEY})"
        )
    return {ADMIN_KEY: admin} if trainer is None else {ADMIN_KEY: admin, TRAINER_KEY: trainer}
