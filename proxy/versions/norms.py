"""Compare the size of a version's tensors with its parent's: a healthy training step changes it by a few per cent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.contract.lora import ADAPTER_PART
from proxy.errors import WeightsRejected
from proxy.versions.safetensors import Header, read_header, scan

Sizes = dict[str, float]
"""The root mean square of a version's tensors by name. Tensors of integers and of 8-bit floats, whose scale is in
another tensor, have none."""

# Smaller sizes count as these. A bias or a lora_B begins at 0, from which any step is a large factor: a step moves
# each number by about the learning rate, and a fit of thousands of steps by much more.
STEP_FLOOR = 0.01
FIT_FLOOR = 0.1
_USUAL_B = 0.1


def sizes_of(squares: Mapping[str, float], headers: Mapping[str, Header]) -> Sizes:
    """Return the sizes of tensors whose sums of squares are known."""
    shapes = shapes_in(headers)
    return {name: math.sqrt(total / max(1, math.prod(shapes[name]))) for name, total in squares.items()}


def shapes_in(headers: Mapping[str, Header]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the files with these headers, by name."""
    return {name: each.shape for header in headers.values() for name, each in header.tensors.items()}


def read_headers(directory: Path) -> dict[str, Header]:
    """Return the headers of all safetensors files of a directory by file name. Raises WeightsRejected, OSError."""
    return {file.name: read_header(file) for file in sorted(directory.glob("*.safetensors"))}


def read_sizes(directory: Path, is_cancelled: Callable[[], bool]) -> Sizes:
    """Read all safetensors files of a directory. Raises WeightsRejected, InterruptedError, OSError."""
    headers = read_headers(directory)
    squares: dict[str, float] = {}
    for name, header in headers.items():
        scan(directory / name, header, is_cancelled, squares)
    return sizes_of(squares, headers)


def usual_sizes(shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
    """Return large usual sizes for an adapter without a parent.

    Trainers draw lora_A `[rank, in]` with the size 1 / √(3 in) or 1 / rank. lora_B is 0 before the first step, but
    the adapter may have been trained elsewhere before; 0.1 is a large size for it then.
    """
    found: Sizes = {}
    for name, shape in shapes.items():
        match = ADAPTER_PART.fullmatch(name)
        if match is not None and match["part"] == "A":
            found[name] = max(1 / math.sqrt(3 * max(1, shape[-1])), 1 / max(1, shape[0]))
        elif match is not None:
            found[name] = _USUAL_B
    return found


def check_growth(sizes: Sizes, usual: Sizes, *, most: float) -> None:
    """Raise WeightsRejected if a tensor is more than `most` times larger than in `usual`."""
    for name, size in sizes.items():
        if name in usual and size > usual[name] * most:
            raise _refusal(name, f"is {size:.3g} in the first adapter, where {usual[name]:.3g} is usual", most)


def check_change(sizes: Sizes, before: Sizes, *, most: float, floor: float) -> None:
    """Raise WeightsRejected if a tensor is more than `most` times larger or smaller than in `before`.

    Sizes below `floor` count as `floor`. Tensors that are in one of the two alone are not compared.
    """
    for name, size in sizes.items():
        if name not in before:
            continue
        new, old = max(size, floor), max(before[name], floor)
        if not old / most <= new <= old * most:
            raise _refusal(name, f"went from {before[name]:.3g} to {size:.3g} in one version", most)


def _refusal(name: str, finding: str, most: float) -> WeightsRejected:
    return WeightsRejected(
        f"the root mean square of {name} {finding}, and a factor of {most:g} is allowed (server.max_norm_change):"
        " lower the learning rate if the training diverges, or see what else changed the weights"
    )
