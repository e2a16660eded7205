"""The course of `base-rl up --ray`: place the groups of a configuration and keep them running until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import ray
from rich.console import Console

from proxy.cli.cluster.hosting import say
from proxy.cli.cluster.ray.groups import PlacedGroup
from proxy.cli.cluster.ray.plan import Group
from proxy.cli.console import Refused
from proxy.cli.signals import end_on_signals
from proxy.settings.ray import RaySettings

NAMESPACE = "base-rl"
"""Ray's namespace of all actors of base-rl."""


def connect(address: str) -> None:
    """Connect this process to the cluster at an address of `ray.init`. Raises Refused with Ray's reason."""
    if address.startswith("ray://"):
        raise Refused(
            f"--ray {address}: Ray Client is not supported; run this on a node of the cluster with --ray auto, or by"
            " `ray job submit`"
        )
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(
            f"no Ray cluster at {address!r} ({error}): start one with `ray start --head`, or name its address as"
            " `ray status` has it"
        ) from error


async def run_groups(groups: Sequence[Group], settings: RaySettings, address: str, out: Console) -> int:
    """Keep the groups running, and end them in order at the first signal. Return the exit status.

    Raises PartFailed and Refused, as `PlacedGroup.run` does, after the other groups have been ended.
    """
    connect(address)
    # After Ray, which sets handlers of its own.
    end_on_signals()
    tasks = [
        asyncio.create_task(
            PlacedGroup(
                group,
                directory=str(Path.cwd()),
                stop_seconds=settings.stop_seconds,
                max_restarts=settings.max_restarts,
                say=say,
            ).run(),
            name=group.name,
        )
        for group in groups
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError:
        out.print("ending: engines drain, the trainer gives its claims back … (Ctrl-C again: at once)")
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ray.shutdown()
    for task in done:
        task.result()
    return 0
