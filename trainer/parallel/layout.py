"""How the ranks divide a model among them, as a string: `d2t2`, `d4c2e4`, `r2d2`.

| axis | its ranks divide |
| --- | --- |
| `r` | the micro-batches, each with a whole set of shards (HSDP, with `d`) |
| `d` | the micro-batches, and the parameters as shards (FSDP2) |
| `c` | the tokens of a row; heads where attention sees all tokens (Ulysses) |
| `t` | heads and the width of the MLPs, and the tokens of a row elsewhere (sequence parallel) |
| `e` | the experts; these are ranks of the axes before, so it does not count as more processes |
| `p` | the layers; not offered |

Ranks are numbered with `r` outermost and `t` innermost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import gcd

from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError

_AXES = {"r": "replicas", "d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}
_PART = re.compile(r"([a-z])([0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a layout must divide. `intermediate`: the width of the dense MLPs, 0 without any; `experts`: 0 without."""

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
        if layout.pipeline > 1:
            raise _wrong(f"{text!r}: pipelines are not offered; leave p out and use t, c or more of d")
        if layout.sharing % layout.expert:
            raise _wrong(
                f"{text!r}: the experts are divided among the ranks of d, c and t, of which there are"
                f" {layout.sharing}; e may be {_divisors(layout.sharing)}"
            )
        return layout

    @property
    def sharing(self) -> int:
        """Ranks that have one set of shards among them."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def world(self) -> int:
        return self.replicas * self.sharing

    @property
    def copy(self) -> int:
        """Ranks that see the same micro-batches."""
        return self.context * self.tensor * self.pipeline

    def __str__(self) -> str:
        letters = {name: letter for letter, name in _AXES.items()}
        sizes = {letters[field.name]: getattr(self, field.name) for field in fields(self)}
        return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"

    def check_world(self, processes: int) -> None:
        """Raises ConfigurationError where another number of processes was started."""
        if self.world == processes:
            return
        fit = f"start {self.world}"
        others = self.copy * self.replicas
        if processes % others == 0:
            data = Layout(replicas=self.replicas, data=processes // others, tensor=self.tensor, context=self.context)
            fit += f", or write {data}"
        raise _wrong(f"{self} is for {_processes(self.world)}, and {processes} joined; {fit}")

    def check_model(self, shape: ModelShape) -> None:
        """Raises ConfigurationError where the model's parts cannot be divided so."""
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
    return None if settings.layout is None else Layout.parse(settings.layout)


def _shares_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Each rank gets as many heads; KV heads are divided, or repeated where there are fewer of them than ranks."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _divisors(number: int) -> str:
    return " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _wrong(message: str) -> ConfigurationError:
    return ConfigurationError(f"trainer.layout: {message}")
