"""How the ranks divide a model among them, as a string: `d2t2`, `d4c2e4`, `r2d2`.

| axis | its ranks divide |
| --- | --- |
| `r` | the micro-batches, each with a whole set of shards (HSDP, with `d`) |
| `d` | the micro-batches, and the parameters as shards (FSDP2) |
| `c` | the tokens of a row; heads where attention sees all tokens (Ulysses) |
| `t` | heads and the width of the MLPs, and the tokens of a row elsewhere (sequence parallel) |
| `e` | the experts; these are ranks of the axes before, so it does not count as more processes |
| `p` | the layers, consecutive ones (`parallel/pipeline.py`) |

Ranks are numbered with `p` outermost, then `r`, and `t` innermost. Those of one place in `p` have a stage, or two
under some schedules; all axes but `p` divide what they have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from math import gcd

from trainer.config import PipelineSchedule, TrainerSettings
from trainer.errors import ConfigurationError

_AXES = {"r": "replicas", "d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"([a-z])([0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a layout must divide. `intermediate`: the width of the dense MLPs, 0 without any; `experts`: 0 without."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks per axis. Build it with `parse`."""

    replicas: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @staticmethod
    def parse(text: str) -> Layout:
        """Axes in any order, each once; those that are left out are 1. Raises ConfigurationError."""
        parts = _PART.findall(text)
        if not parts or "".join(letter + number for letter, number in parts) != text:
            raise _wrong(f"{text!r}: write axes with their sizes, for example d2t2; the axes are {', '.join(_AXES)}")
        sizes: dict[str, int] = {}
        for letter, number in parts:
            if letter not in _AXES:
                raise _wrong(f"{text!r}: there is no axis {letter}; the axes are {', '.join(_AXES)}")
            if _AXES[letter] in sizes:
                raise _wrong(f"{text!r}: {letter} stands there twice")
            if int(number) < 1:
                raise _wrong(f"{text!r}: {letter} must be 1 or more")
            sizes[_AXES[letter]] = int(number)
        layout = Layout(**sizes)
        if layout.sharing % layout.expert:
            raise _wrong(
                f"{text!r}: the experts are divided among the ranks of d, c and t, of which there are"
                f" {layout.sharing}; e may be {_divisors(layout.sharing)}"
            )
        return layout

    @property
    def sharing(self) -> int:
        """Ranks that have one set of shards of a stage among them."""
        return self.data * self.context * self.tensor

    @property
    def stage(self) -> int:
        """Ranks that have the same place in the pipeline."""
        return self.replicas * self.sharing

    @property
    def world(self) -> int:
        return self.stage * self.pipeline

    @property
    def row(self) -> int:
        """Ranks of a stage that divide the tokens of a row."""
        return self.context * self.tensor

    @property
    def copy(self) -> int:
        """Ranks that see the same micro-batches."""
        return self.row * self.pipeline

    def __str__(self) -> str:
        letters = {name: letter for letter, name in _AXES.items()}
        sizes = {letters[field.name]: getattr(self, field.name) for field in fields(self)}
        return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"

    def check_world(self, processes: int, *, asked: bool = False) -> None:
        """Raises ConfigurationError where another number of processes was started, or is `asked` for."""
        if self.world == processes:
            return
        there, fit = f"{processes} joined", f"start {self.world}"
        if asked:
            there, fit = f"nproc is {processes}", "leave nproc out"
        others = self.copy * self.replicas
        if processes % others == 0:
            data = replace(self, data=processes // others, expert=1)
            fit += f", or write {data}"
        raise _wrong(f"{self} is for {_processes(self.world)}, and {there}; {fit}")

    def check_model(self, shape: ModelShape, stages_per_rank: int = 1) -> None:
        """Raises ConfigurationError where the model's parts cannot be divided so."""
        if self.pipeline > 1 and self.pipeline * stages_per_rank > shape.layers:
            most = shape.layers // stages_per_rank
            each = "" if stages_per_rank == 1 else f" in {stages_per_rank} stages for each rank of p"
            raise _wrong(
                f"{self}: p{self.pipeline} needs a layer for each stage{each}, and the model has {shape.layers}"
                f" layers; p may be {_up_to(most)}"
            )
        both = gcd(shape.heads, shape.kv_heads, shape.intermediate)
        if both % self.tensor:
            mlp = f" and an MLP {shape.intermediate} wide" if shape.intermediate else ""
            raise _wrong(
                f"{self}: t{self.tensor} does not divide the model's {shape.heads} heads, {shape.kv_heads} KV heads"
                f"{mlp}; t may be {_divisors(both)}"
            )
        heads, kv_heads = shape.heads // self.tensor, shape.kv_heads // self.tensor
        if not _shares_heads(heads, kv_heads, self.context):
            fitting = [str(size) for size in range(1, heads + 1) if _shares_heads(heads, kv_heads, size)]
            raise _wrong(
                f"{self}: c{self.context} cannot share {heads} heads with {kv_heads} KV heads"
                f"{' of each rank of t' if self.tensor > 1 else ''}; c may be {' or '.join(fitting)}"
            )
        if self.expert > 1 and not shape.experts:
            raise _wrong(f"{self}: the model has no experts; leave e out")
        if self.expert > 1 and shape.experts % self.expert:
            raise _wrong(
                f"{self}: e{self.expert} does not divide the model's {shape.experts} experts; e may be"
                f" {_divisors(gcd(shape.experts, self.sharing))}"
            )


def layout_of(settings: TrainerSettings) -> Layout | None:
    """None: every rank has its own share of a batch. Raises ConfigurationError."""
    layout = None if settings.layout is None else Layout.parse(settings.layout)
    schedule = settings.pipeline_schedule
    if schedule is not None and (layout is None or layout.pipeline == 1):
        raise ConfigurationError(
            f"trainer.pipeline_schedule: {schedule.value} is an order of work in a pipeline, and trainer.layout has"
            " no p; leave it out, or write p2 or more into the layout"
        )
    if schedule is PipelineSchedule.ZBV and layout is not None and layout.stage > 1:
        raise ConfigurationError(
            f"trainer.pipeline_schedule: zbv goes back through a stage in two parts, between which the gathered"
            f" parameters of other axes are gone; with it the layout is p alone, and not {layout}"
        )
    return layout


def _shares_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Each rank gets as many heads; KV heads are divided, or repeated where there are fewer of them than ranks."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _up_to(most: int) -> str:
    return " or ".join(str(size) for size in range(1, max(1, most) + 1)) if most < 5 else f"up to {most}"


def _divisors(number: int) -> str:
    return " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _wrong(message: str) -> ConfigurationError:
    return ConfigurationError(f"trainer.layout: {message}")
