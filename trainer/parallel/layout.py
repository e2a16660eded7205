"""How the ranks divide a model among them, as a string: `d2t2`, `d4c2e4`, `r2d2`.

| axis | its ranks divide |
| --- | --- |
| `r` | the micro-batches, each with a whole set of shards (HSDP, with `d`) |
| `d` | the micro-batches, and the parameters as shards (FSDP2) |
| `c` | the tokens of a row; heads where attention sees all tokens (Ulysses) |
| `t` | heads and the width of the MLPs, and the tokens of a row elsewhere (sequence parallel) |
| `e` | the experts; these are ranks of the axes before, so it does not count as more processes |
| `p` | the layers, consecutive ones (`parallel/pipeline.py`) |

Ranks are numbered with `p` outermost, then `r`, and `t` innermost. The ranks at one place of `p` hold one stage, or
two under some schedules; all other axes divide that stage.
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
    """The sizes of a model that a layout must divide. `intermediate`: the width of the dense MLPs, 0 without any."""

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
        """Parse axes in any order, each at most once; a missing axis has size 1. Raises ConfigurationError."""
        parts = _PART.findall(text)
        if not parts or "".join(letter + number for letter, number in parts) != text:
            raise _invalid(
                f"{text!r}: write axes with their sizes, for example d2t2; the axes are {', '.join(_AXES)}"
            )
        sizes: dict[str, int] = {}
        for letter, number in parts:
            if letter not in _AXES:
                raise _invalid(f"{text!r}: there is no axis {letter}; the axes are {', '.join(_AXES)}")
            if _AXES[letter] in sizes:
                raise _invalid(f"{text!r}: {letter} is given twice")
            if int(number) < 1:
                raise _invalid(f"{text!r}: {letter} must be 1 or more")
            sizes[_AXES[letter]] = int(number)
        layout = Layout(**sizes)
        if layout.sharing % layout.expert:
            raise _invalid(
                f"{text!r}: the {layout.sharing} ranks of d, c and t divide the experts among them; e may be"
                f" {_divisors(layout.sharing)}"
            )
        return layout

    @property
    def sharing(self) -> int:
        """Ranks that together hold one set of shards of a stage."""
        return self.data * self.context * self.tensor

    @property
    def stage(self) -> int:
        """Ranks at one place of the pipeline."""
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
        """Raise ConfigurationError if the layout needs another number of processes than were started, or than the
        setting `nproc` asks for (`asked`)."""
        if self.world == processes:
            return
        there, fit = f"{processes} joined", f"start {self.world}"
        if asked:
            there, fit = f"nproc is {processes}", "leave nproc out"
        others = self.copy * self.replicas
        if processes % others == 0:
            data = replace(self, data=processes // others, expert=1)
            fit += f", or write {data}"
        raise _invalid(f"{self} is for {_processes(self.world)}, and {there}; {fit}")

    def check_model(self, shape: ModelShape, stages_per_rank: int = 1) -> None:
        """Raise ConfigurationError if this layout cannot divide the model, with the sizes that can."""
        if self.pipeline > 1 and self.pipeline * stages_per_rank > shape.layers:
            most = shape.layers // stages_per_rank
            each = "" if stages_per_rank == 1 else f" in {stages_per_rank} stages for each rank of p"
            raise _invalid(
                f"{self}: p{self.pipeline} needs a layer for each stage{each}, and the model has {shape.layers}"
                f" layers; p may be {_up_to(most)}"
            )
        both = gcd(shape.heads, shape.kv_heads, shape.intermediate)
        if both % self.tensor:
            mlp = f" and an MLP {shape.intermediate} wide" if shape.intermediate else ""
            raise _invalid(
                f"{self}: t{self.tensor} does not divide the model's {shape.heads} heads, {shape.kv_heads} KV heads"
                f"{mlp}; t may be {_divisors(both)}"
            )
        heads, kv_heads = shape.heads // self.tensor, shape.kv_heads // self.tensor
        if not _shares_heads(heads, kv_heads, self.context):
            fitting = [str(size) for size in range(1, heads + 1) if _shares_heads(heads, kv_heads, size)]
            raise _invalid(
                f"{self}: c{self.context} cannot share {heads} heads with {kv_heads} KV heads"
                f"{' of each rank of t' if self.tensor > 1 else ''}; c may be {' or '.join(fitting)}"
            )
        if self.expert > 1 and not shape.experts:
            raise _invalid(f"{self}: the model has no experts; leave e out")
        if self.expert > 1 and shape.experts % self.expert:
            raise _invalid(
                f"{self}: e{self.expert} does not divide the model's {shape.experts} experts; e may be"
                f" {_divisors(gcd(shape.experts, self.sharing))}"
            )


def layout_of(settings: TrainerSettings) -> Layout | None:
    """Return the configured layout; None if every rank takes its own share of a batch. Raises ConfigurationError."""
    layout = None if settings.layout is None else Layout.parse(settings.layout)
    schedule = settings.pipeline_schedule
    if schedule is not None and (layout is None or layout.pipeline == 1):
        raise ConfigurationError(
            f"trainer.pipeline_schedule: {schedule.value} orders the work of a pipeline, and trainer.layout has no"
            " p; remove the setting, or give the layout p2 or more"
        )
    if schedule is PipelineSchedule.ZBV and layout is not None and layout.stage > 1:
        raise ConfigurationError(
            f"trainer.pipeline_schedule: zbv runs the backward pass of a stage in two parts, and the gathered"
            f" parameters of other axes are freed between them; use a layout of p alone instead of {layout}"
        )
    return layout


def _shares_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether heads and KV heads divide evenly over the ranks. KV heads that are fewer than the ranks are
    repeated."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _up_to(most: int) -> str:
    return " or ".join(str(size) for size in range(1, max(1, most) + 1)) if most < 5 else f"up to {most}"


def _divisors(number: int) -> str:
    return " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _invalid(message: str) -> ConfigurationError:
    return ConfigurationError(f"trainer.layout: {message}")
