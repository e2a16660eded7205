"""What an engine and a trainer need of a cluster's nodes, whichever scheduler places them."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from proxy.settings.section import Section


class PlacementSettings(Section):
    engine_gpus: NonNegativeInt | None = None
    """GPUs of an engine; default: `engine.tensor_parallel` if `engine.device` is `cuda`, else none."""
    engine_cpus: PositiveInt = 1
    engine_memory_gib: PositiveInt | None = None
    """Memory of an engine; default: the scheduler's."""
    trainer_nodes: PositiveInt = 1
    trainer_ranks_per_node: PositiveInt = 1
    trainer_gpus_per_node: NonNegativeInt = 0
    trainer_cpus_per_rank: PositiveInt = 1
    trainer_memory_gib: PositiveInt | None = None
    """Memory of the trainer on each node; default: the scheduler's."""
