"""`base-rl up --ray`: its options are checked here, before Ray is imported."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

from rich.console import Console

from proxy.cli.cluster.programs import ADMIN_KEY, keys_of_programs, proxy_address
from proxy.cli.cluster.ray.plan import Placing
from proxy.cli.console import Refused
from proxy.cli.extras import require_extras
from proxy.cli.operations import Operations
from proxy.cli.trainer_process import resolved_by_trainer
from proxy.cli.up import UpOptions
from proxy.settings import load_settings

_CONNECT_SECONDS = 10.0


async def run_up_on_ray(address: str, options: UpOptions, out: Console) -> int:
    """Place engines and trainer on the Ray cluster at `address`, keep them running until Ctrl-C or SIGTERM, and
    return the exit status.

    Raises Refused, ConfigurationError and ProxyUnreachable before anything is placed, PartFailed afterwards.
    """
    config = _the_file(options)
    settings = load_settings(config)
    url = proxy_address(settings)
    with_trainer = options.trainer is not False
    ranks = None
    if with_trainer:
        resolved = await asyncio.to_thread(resolved_by_trainer, ["--config", str(config.resolve())], {})
        ranks = resolved["nproc"]
    admin_key = os.environ.get(ADMIN_KEY)
    keys = {} if options.dry_run else keys_of_programs(settings.server.data_dir, admin_key, with_trainer=with_trainer)
    placing = Placing(
        settings=settings, config_file=config, url=url, ranks=ranks, with_trainer=with_trainer, keys=keys
    )
    groups = placing.groups()
    if options.dry_run:
        shown = [
            {
                "name": group.name,
                "bundles": group.bundles,
                "actors": {member.name: ["python", *member.arguments] for member in group.members},
            }
            for group in groups
        ]
        out.print_json(json.dumps(shown))
        return 0
    require_extras("ray")
    async with Operations(url, keys[ADMIN_KEY]) as operations:
        # An address or a key that is wrong is said here, not in the logs of the nodes.
        await operations.engines()
        await asyncio.to_thread(_check_address, address)
        from proxy.cli.cluster.ray.up import run_fleet

        await run_fleet(
            settings,
            engine=placing.engine,
            trainer=placing.trainer(),
            operations=operations,
            address=address,
            out=out,
        )
    return 0


def _the_file(options: UpOptions) -> Path:
    """Return the configuration file. Raises Refused without one, and for options that the nodes would not see."""
    given = [f"{section}.{key}" for section, keys in options.overrides.items() for key in keys]
    given += [name for name, value in (("--nproc", options.nproc), ("--seed", options.seed)) if value is not None]
    if options.config is None or given:
        without = f" instead of {', '.join(given)}" if given else ""
        raise Refused(f"--ray: the nodes read a configuration file; name it with --config{without}")
    return options.config


def _check_address(address: str) -> None:
    """Raise Refused for an address at which there is no cluster: Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise Refused(
            f"--ray {address}: Ray Client is not supported; run this on a node of the cluster with --ray auto, or by"
            " `ray job submit`"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`, or an address that Ray refuses at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise Refused(
            f"no Ray cluster at {address} ({error}): start one with `ray start --head`, or name the address that `ray"
            " status` has"
        ) from error
