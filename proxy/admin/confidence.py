"""The picture of a comparison: the difference of two mean rewards with its bounds, as points of an SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

WIDTH, HEIGHT = 640.0, 180.0
# Room for labels at the left edge and below.
_LEFT, _BOTTOM, _TOP = 40.0, 20.0, 8.0


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """`band` is the polygon between the bounds, `line` the mean difference; both are texts of points. `zero` is the
    height of no difference, `ticks` are heights with their labels, and `most` is the number of sessions at the right
    edge."""

    band: str
    line: str
    zero: float
    ticks: tuple[tuple[float, str], ...]
    most: int


def picture(evidence: dict[str, Any]) -> Picture | None:
    """Return the picture of a finding's evidence; None if it has no curve, or one that this release cannot draw."""
    curve = evidence.get("curve")
    if not isinstance(curve, list) or len(curve) < 2:
        return None
    points = [(float(count), float(mean), float(low), float(high)) for count, mean, low, high in curve]
    most = points[-1][0]
    largest = max(0.05, *(max(abs(low), abs(high), abs(mean)) for _, mean, low, high in points))

    def x(count: float) -> float:
        return _LEFT + (WIDTH - _LEFT) * count / most

    def y(value: float) -> float:
        return _TOP + (HEIGHT - _BOTTOM - _TOP) * (largest - value) / (2 * largest)

    upper = [(x(count), y(high)) for count, _, _, high in points]
    lower = [(x(count), y(low)) for count, _, low, _ in points]
    return Picture(
        band=_points([*upper, *reversed(lower)]),
        line=_points([(x(count), y(mean)) for count, mean, _, _ in points]),
        zero=round(y(0.0), 1),
        ticks=tuple((round(y(value), 1), f"{value:+.2g}") for value in (largest * 0.8, 0.0, -largest * 0.8)),
        most=int(most),
    )


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
