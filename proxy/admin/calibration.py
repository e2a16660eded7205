"""The picture of a judge's calibration: the means of people's rewards over the judge's scores, as points of an SVG.
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from proxy.judges.agreement import Bucket

WIDTH, HEIGHT = 320.0, 240.0
# Room for labels at the left edge and below, and for half a dot at the others.
_LEFT, _BOTTOM, _EDGE = 44.0, 34.0, 12.0
_SMALLEST, _LARGEST = 3.5, 9.0


class Dot(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of scores. Its area grows with the number of pairs."""

    x: float
    y: float
    radius: float
    title: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`ideal` are the points of the line on which a judge that scores as people do has its dots, `line` those of the
    dots. `across` and `down` are positions on both axes with their labels."""

    ideal: str
    line: str
    dots: tuple[Dot, ...]
    across: tuple[tuple[float, str], ...]
    down: tuple[tuple[float, str], ...]


def calibration(buckets: Sequence[Bucket], *, low: float, high: float) -> Calibration | None:
    """Return the picture; None without buckets. `low` and `high` are the judge's range; people's rewards may lie
    outside of it."""
    if not buckets:
        return None
    least = min(low, *(bucket.people_mean for bucket in buckets))
    most = max(high, *(bucket.people_mean for bucket in buckets))
    largest = max(bucket.count for bucket in buckets)

    def x(value: float) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _EDGE) * (value - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(_EDGE + (HEIGHT - _BOTTOM - _EDGE) * (most - value) / (most - least), 1)

    dots = tuple(
        Dot(
            x=x(bucket.judge_mean),
            y=y(bucket.people_mean),
            radius=round(_SMALLEST + (_LARGEST - _SMALLEST) * math.sqrt(bucket.count / largest), 1),
            title=f"{bucket.low:.3g} to {bucket.high:.3g}: {bucket.count} pairs, the judge's mean"
            f" {bucket.judge_mean:.3g}, people's {bucket.people_mean:.3g}",
        )
        for bucket in buckets
    )
    return Calibration(
        ideal=f"{x(low)},{y(low)} {x(high)},{y(high)}",
        line=" ".join(f"{dot.x},{dot.y}" for dot in dots),
        dots=dots,
        across=tuple((x(value), f"{value:.3g}") for value in (low, (low + high) / 2, high)),
        down=tuple((y(value), f"{value:.3g}") for value in (least, (least + most) / 2, most)),
    )
