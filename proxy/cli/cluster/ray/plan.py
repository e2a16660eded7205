"""Which actors a configuration asks for, and what they need of Ray's nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import msgspec

from proxy.cli.cluster.programs import (
    ADMIN_KEY,
    TRAINER,
    TRAINER_KEY,
    check_engine,
    check_ranks,
    gpus_of_engine,
    rank_arguments,
    serve_arguments,
)
from proxy.cli.console import Refused
from proxy.contract.configuration import ENVIRONMENT_PREFIX
from proxy.settings import Settings

_GIB = 2**30
_RESTARTS_VARIABLE = "BASE_RL_TRAINER_RESTARTS"

Resources = dict[str, float]
"""Amounts by Ray's names: CPU, GPU, memory (bytes), and those that nodes were started with."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An actor, which runs one program. `arguments` are those of Python."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = {}
    """Variables over those that the whole group has."""
    bundle: int = 0
    """Index of the bundle that the actor is placed in."""
    cpus: float
    gpus: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Actors that start together and end together: an engine, or all ranks of the trainer.

    Each of `bundles` is reserved on one node. `environment` are variables of every member.
    """

    name: str
    bundles: tuple[Resources, ...]
    members: tuple[Member, ...]
    environment: dict[str, str] = {}


class Placing(msgspec.Struct, frozen=True, kw_only=True):
    """What to place for a configuration.

    `url` is the proxy's address, `ranks` the number of processes that the trainer's configuration asks for (None: any
    number), `keys` the variables with the keys. Raises Refused for an engine that is not started here.
    """

    settings: Settings
    config_file: Path
    url: str
    ranks: int | None
    with_trainer: bool
    keys: Mapping[str, str]

    def __post_init__(self) -> None:
        check_engine(self.settings, "Ray")

    def groups(self) -> list[Group]:
        """Return the configured number of engines, and the trainer. Raises Refused, as `trainer` does."""
        engines = [self.engine(number) for number in range(1, self.settings.engine.replicas + 1)]
        trainer = self.trainer()
        return engines if trainer is None else [*engines, trainer]

    def engine(self, number: int) -> Group:
        """Return the group of one engine. `number` counts from 1 and is part of the engine's name."""
        settings, ray = self.settings, self.settings.ray
        name = f"{settings.run.name}-ray-{number}"
        gpus = gpus_of_engine(settings, ray)
        serve = [*serve_arguments(name, self.config_file, self.url), "--drain-seconds", str(ray.stop_seconds)]
        bundle = _bundle(ray.engine_cpus, gpus, ray.engine_memory_gib, ray.engine_resources)
        member = Member(name=name, arguments=tuple(serve), cpus=ray.engine_cpus, gpus=gpus)
        environment = _environment(self.keys, ADMIN_KEY)
        return Group(name=name, bundles=(bundle,), members=(member,), environment=environment)

    def trainer(self) -> Group | None:
        """Return the group of the trainer's ranks. Raises Refused if Ray would start another number of ranks."""
        if not self.with_trainer:
            return None
        return _trainer_group(self.settings, self.config_file, self.url, self.ranks, self.keys)


def _trainer_group(
    settings: Settings, config_file: Path, url: str, ranks: int | None, keys: Mapping[str, str]
) -> Group:
    ray = settings.ray
    world, here = check_ranks(ranks, ray, "ray"), ray.trainer_ranks_per_node
    if ray.trainer_gpus_per_node not in (0, here):
        raise Refused(
            f"ray.trainer_gpus_per_node is {ray.trainer_gpus_per_node}, and each of the {here} ranks of a node"
            " computes on one GPU: make it equal to ray.trainer_ranks_per_node, or 0"
        )
    gpus = 1 if ray.trainer_gpus_per_node else 0
    name = f"{settings.run.name}-{TRAINER}"
    bundle = _bundle(here * ray.trainer_cpus_per_rank, here * gpus, ray.trainer_memory_gib, ray.trainer_resources)
    # Of its own for each start: a bound on micro-batches must not outlive a change of the configuration.
    restarts = settings.server.data_dir.resolve() / "ray" / f"{name}.restarts" / uuid4().hex
    members = [
        Member(
            name=f"{name}-{rank}",
            arguments=tuple(rank_arguments("trainer.launch.rank", config_file, url)),
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                # Ray shows each actor its own GPU alone, which is then the first one.
                "LOCAL_RANK": "0" if gpus else str(rank % here),
            },
            bundle=rank // here,
            cpus=ray.trainer_cpus_per_rank,
            gpus=gpus,
        )
        for rank in range(world)
    ]
    return Group(
        name=name,
        bundles=(bundle,) * ray.trainer_nodes,
        members=tuple(members),
        environment=_environment(keys, TRAINER_KEY) | {_RESTARTS_VARIABLE: str(restarts)},
    )


def _bundle(cpus: int, gpus: int, memory_gib: int | None, further: Mapping[str, float]) -> Resources:
    bundle: Resources = {"CPU": cpus, **further}
    bundle |= {"GPU": gpus} if gpus else {}
    return bundle | ({"memory": memory_gib * _GIB} if memory_gib is not None else {})


def _environment(keys: Mapping[str, str], key: str) -> dict[str, str]:
    """Return this process's variables of base-rl, with the one key that the program needs."""
    others = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in (ADMIN_KEY, TRAINER_KEY)
    }
    return others | ({key: keys[key]} if key in keys else {})
