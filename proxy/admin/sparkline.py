"""The points of a small curve of rewards, for an SVG polyline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT = 100.0, 24.0
# Room for half the line's width, which would be cut off at the edges.
_MARGIN = 2.0


def sparkline(values: Sequence[float]) -> str:
    """Return the points of a line through the values from left to right, `x,y` separated by spaces.

    Rewards mostly live in [0, 1] or [-1, 1]: these bounds stay fixed, so that curves of several runs are comparable.
    Other values fill the height. A single value is a level line.
    """
    if not values:
        return ""
    low, high = _bounds(values)
    values = values if len(values) > 1 else [values[0], values[0]]
    width, height = WIDTH - 2 * _MARGIN, HEIGHT - 2 * _MARGIN
    # Halves, so that the difference of two huge values does not overflow. Equal values lie in the middle.
    share = [(value / 2 - low / 2) / (high / 2 - low / 2) if low / 2 < high / 2 else 0.5 for value in values]
    step = width / (len(values) - 1)
    return " ".join(
        f"{_MARGIN + index * step:.1f},{_MARGIN + (1 - part) * height:.1f}" for index, part in enumerate(share)
    )


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    for least, most in ((0.0, 1.0), (-1.0, 1.0)):
        if least <= low and high <= most:
            return least, most
    return low, high
