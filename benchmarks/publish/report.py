"""The figures of `make bench-publish` with their bounds, as `docs/performance.md` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.targets import Target, target_rows

# The transports whose speed has a bound, and the one whose bytes have.
_FAST = ("disk", "tensors")
_SMALL = "delta"
# At this size the small files and the flushing of directories, which a copy has not, take longer than the bytes.
_SMALL_SIZE = "1M"

_HEAD = (
    "transport",
    "parameters",
    "MB",
    "of whole files",
    "seconds to served",
    "stall",
    "stall with state",
    "speed by a copy",
)
_TARGET_HEAD = ("target", "bound", "measured")


def _figures(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for transport, sizes in result.items():
        if transport != "machine":
            for size, figures in sizes.items():
                yield transport, size, figures


def not_identical(result: dict[str, Any]) -> list[str]:
    """Return the transports and sizes at which an engine got other bits than those of the trainer."""
    return [f"{transport} {size}" for transport, size, figures in _figures(result) if not figures["bit_identical"]]


def judged(result: dict[str, Any]) -> list[Target]:
    """Return the figures of a whole result with their bounds: the worst of each kind."""
    all_of = list(_figures(result))
    fast = [each for each in all_of if each[0].split()[0] in _FAST]
    targets = [
        Target(
            what=f"speed of {kind} by a copy at {size}",
            measured=min(figures["speed_vs_copy"] for name, of, figures in fast if of == size and kind in name),
            bound=0.5,
            at_least=True,
        )
        for kind in _FAST
        for size in dict.fromkeys(of for _, of, _ in fast if of != _SMALL_SIZE)
    ]
    small = [figures for transport, _, figures in all_of if _SMALL in transport]
    return [
        *targets,
        Target(
            what="stall by a synchronous write",
            measured=max(figures["stall_vs_synchronous"] for _, _, figures in all_of),
            bound=0.1,
        ),
        Target(
            what="stall with the optimiser's state",
            measured=max(figures["stall_with_state_vs_synchronous"] for _, _, figures in all_of),
            bound=0.1,
        ),
        Target(
            what="bytes of a difference by whole files",
            measured=max(figures["bytes_vs_full"] for figures in small),
            bound=0.1,
        ),
    ]


def rates(result: dict[str, Any]) -> list[list[str]]:
    """Return a row for each size: the share of the whole files that a difference takes, by the learning rate."""
    return [
        [size, *(f"{share:.1%}" for share in figures["bytes_vs_full_by_learning_rate"].values())]
        for transport, size, figures in _figures(result)
        if _SMALL in transport
    ]


def page_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return a row for each transport and size."""
    return [
        [
            transport,
            size,
            f"{figures['bytes'] / 1e6:.2f}",
            f"{figures['bytes_vs_full']:.1%}",
            f"{figures['seconds_to_served']:.2f}",
            f"{figures['stall_vs_synchronous']:.1%}",
            f"{figures['stall_with_state_vs_synchronous']:.1%}",
            f"{figures['speed_vs_copy']:.2f}",
        ]
        for transport, size, figures in _figures(result)
    ]


def page(result: dict[str, Any]) -> str:
    """Return the tables of the page."""
    by_rate = ("parameters", "1e-6", "1e-5", "1e-4")
    return "\n\n".join(
        _table(head, rows)
        for head, rows in (
            (_HEAD, page_rows(result)),
            (by_rate, rates(result)),
            (_TARGET_HEAD, target_rows(judged(result))),
        )
    )


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
