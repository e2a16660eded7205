"""Layouts that fit, for a model that does not fit as asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.errors import ConfigurationError
from trainer.models.archon.config import ModelConfig
from trainer.parallel.layout import Layout
from trainer.planning.memory import USABLE, RankMemory, Work, rank_memory

_MOST_GPUS = 4096
_FEWEST_TOKENS = 2048
# Ranks that divide heads or experts exchange data in every layer, which needs the links inside one machine.
_MOST_TENSOR = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A layout on `gpus` devices, with the work and the memory of its largest rank in bytes."""

    gpus: int
    layout: Layout
    work: Work
    memory: RankMemory


def fits(memory: RankMemory, device_bytes: int) -> bool:
    return memory.total <= USABLE * device_bytes


def propose(config: ModelConfig, gpus: int, work: Work, device_bytes: int) -> Proposal | None:
    """Return what fits with the least change: on as many GPUs another layout, then checkpointing, then smaller
    micro-batches; then all of these on more GPUs. None if the model fits on no number up to 4,096."""
    while gpus <= _MOST_GPUS:
        for layout in layouts(config, gpus):
            memory = rank_memory(config, layout, work)
            if fits(memory, device_bytes):
                return Proposal(gpus=gpus, layout=layout, work=work, memory=memory)
        for easier in _easier(work):
            for layout in layouts(config, gpus):
                memory = rank_memory(config, layout, easier)
                if fits(memory, device_bytes):
                    return Proposal(gpus=gpus, layout=layout, work=easier, memory=memory)
        gpus *= 2
    return None


def layouts(config: ModelConfig, gpus: int) -> Iterator[Layout]:
    """Yield the layouts for `gpus` processes that can divide the model, those with fewer divisions beside d first."""
    found = []
    for pipeline in _divisors(gpus):
        for tensor in _divisors(gpus // pipeline, _MOST_TENSOR):
            for context in _divisors(gpus // (pipeline * tensor), _MOST_TENSOR):
                data = gpus // (pipeline * tensor * context)
                for expert in _divisors(data * context * tensor, _MOST_TENSOR) if config.experts else [1]:
                    found.append(Layout(data=data, tensor=tensor, context=context, pipeline=pipeline, expert=expert))
    for layout in sorted(found, key=_effort):
        try:
            layout.check_model(config.shape)
        except ConfigurationError:
            continue
        yield layout


def _effort(layout: Layout) -> tuple[int, int]:
    """Return a measure of what a layout costs beside d: the number of further axes, then their sizes."""
    sizes = (layout.expert, layout.tensor, layout.context, layout.pipeline)
    return sum(
        size > 1 for size in sizes
    ), layout.expert + 2 * layout.tensor + 2 * layout.context + 3 * layout.pipeline


def _easier(work: Work) -> Iterator[Work]:
    checkpointed = replace(work, checkpointing=True)
    if checkpointed != work:
        yield checkpointed
    tokens = work.tokens // 2
    while tokens >= _FEWEST_TOKENS:
        yield replace(checkpointed, tokens=tokens)
        tokens //= 2


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
