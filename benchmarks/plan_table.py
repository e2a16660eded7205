"""The table of memory in docs/scale.md: `python -m benchmarks.plan_table` prints it."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.parallel.layout import Layout
from trainer.planning.memory import Work, parameters, rank_memory
from trainer.planning.proposals import Proposal, fits, propose
from trainer.planning.shapes import KNOWN

DEVICE_GIB = 80
GPUS = (1, 8, 64)
_GIB = 1 << 30
_HEADINGS = (
    *("model", "GPUs", "layout", "tokens", "checkpointing", "weights", "gradients", "optimiser", "activations"),
    *("other", "most"),
)


def table() -> str:
    """Return the table: for each model and number of GPUs the first layout that fits, in GiB of the largest rank."""
    lines = [_line(_HEADINGS), _line("---" for _ in _HEADINGS)]
    for name, config in KNOWN.items():
        for gpus in GPUS:
            label = f"{name.partition('/')[2]} ({parameters(config) / 1e9:.1f} B)"
            work = Work()
            memory = rank_memory(config, Layout(data=gpus), work)
            alone = Proposal(gpus=gpus, layout=Layout(data=gpus), work=work, memory=memory)
            found = alone if fits(memory, DEVICE_GIB * _GIB) else propose(config, gpus, work, DEVICE_GIB * _GIB)
            if found is None or found.gpus != gpus:
                more = "on none" if found is None else f"{found.gpus} GPUs: `{found.layout}`"
                lines.append(_line([label, str(gpus), f"does not fit; {more}", *[""] * (len(_HEADINGS) - 3)]))
                continue
            lines.append(_line([label, str(gpus), *_cells(found)]))
    return "\n".join(lines)


def _cells(found: Proposal) -> list[str]:
    memory = found.memory
    sizes = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
    other = memory.gathered + memory.casts + memory.logits + memory.reference
    return [
        f"`{found.layout}`",
        f"{found.work.tokens:,}",
        "yes" if found.work.checkpointing else "no",
        *(f"{size / _GIB:.1f}" for size in (*sizes, other, memory.total)),
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table())
