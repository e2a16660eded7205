"""The course of `base-rl up --ray`: place the groups of a configuration and keep them running until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import ray
from rich.console import Console

from proxy.cli.cluster.hosting import say
from proxy.cli.cluster.ray.fleet import Fleet
from proxy.cli.cluster.ray.groups import PlacedGroup
from proxy.cli.cluster.ray.plan import Group
from proxy.cli.cluster.ray.scaling import LoadRule, WantedEngines
from proxy.cli.console import Refused
from proxy.cli.operations import Operations
from proxy.cli.signals import end_on_signals
from proxy.settings import Settings

NAMESPACE = "base-rl"
"""Ray's namespace of all actors of base-rl."""


def connect(address: str) -> None:
    """Connect this process to the cluster at an address of `ray.init`. Raises Refused with Ray's reason."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(
            f"no Ray cluster at {address!r} ({error}): start one with `ray start --head`, or name its address as"
            " `ray status` has it"
        ) from error


async def run_fleet(
    settings: Settings,
    *,
    engine: Callable[[int], Group],
    trainer: Group | None,
    operations: Operations,
    address: str,
    out: Console,
) -> None:
    """Keep engines and trainer running on the cluster at `address`, and end them in order at the first signal.
    `engine` returns the group of the engine with a number.

    Raises PartFailed and Refused, as `PlacedGroup.run` does, after the other groups have been ended.
    """
    connect(address)
    # After Ray, which sets handlers of its own.
    end_on_signals()

    async def keep(group: Group) -> None:
        await PlacedGroup(
            group,
            directory=str(Path.cwd()),
            stop_seconds=settings.ray.stop_seconds,
            max_restarts=settings.ray.max_restarts,
            say=say,
        ).run()

    fleet = Fleet(
        engine=engine,
        trainer=trainer,
        keep=keep,
        rule=LoadRule(settings.ray),
        wanted=WantedEngines(settings.server.data_dir, settings.run.name),
        rows=operations.engines,
        say=say,
    )
    running = asyncio.ensure_future(fleet.run(settings.engine.replicas))
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        out.print("ending: engines drain, the trainer gives its claims back … (Ctrl-C again: at once)")
        running.cancel()
        await asyncio.wait([running])
        raise
    finally:
        ray.shutdown()
    running.result()
