"""Numbers, times and sizes as people read them. Pure; the templates' filters."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.sessions.identification import AttributedBy

ABSENT = "–"
"""Shown for what is not known: absent is not zero."""

_THIN = " "
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def number(value: float | None, digits: int = 2) -> str:
    """`digits` decimals for fractions, none for integers; thousands set apart by a thin space."""
    if value is None or not math.isfinite(value):
        return ABSENT
    text = f"{value:,d}" if isinstance(value, int) else f"{value:,.{digits}f}"
    if text.startswith("-"):
        text = "−" + text[1:] if any(character in "123456789" for character in text) else text[1:]
    return text.replace(",", _THIN)


def compact(value: float | None) -> str:
    """Three significant digits: 950, 1.25k, 3.4M."""
    if value is None or not math.isfinite(value):
        return ABSENT
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound * 0.9995:
            return f"{value / bound:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def reward(value: float | None) -> str:
    """Up to three decimals without needless zeros: 1, 0.25, −0.333."""
    if value is None or not math.isfinite(value):
        return ABSENT
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share * 100:.0f}{_THIN}%"


def seconds(value: float | None) -> str:
    """A duration: 34 ms, 1.32 s, 2 min 5 s, 3 h 12 min, 2 d 4 h."""
    if value is None or not math.isfinite(value):
        return ABSENT
    value = max(0.0, value)
    if value < 0.9995:
        return f"{value * 1000:.0f}{_THIN}ms"
    if value < 9.995:
        return f"{value:.2f}{_THIN}s"
    whole = round(value)
    if whole < _MINUTE:
        return f"{whole}{_THIN}s"
    for unit, name, smaller, smaller_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = int(whole % unit // smaller)
            return f"{int(whole // unit)}{_THIN}{name}" + (f" {rest}{_THIN}{smaller_name}" if rest else "")
    raise AssertionError


def ago(at: float | None, now: float) -> str:
    """One unit is enough: just now, 12 s ago, 5 min ago, 3 h ago, 2 d ago."""
    if at is None:
        return ABSENT
    passed = now - at
    if passed < 1.5:
        return "just now"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if passed >= unit:
            return f"{int(passed // unit)}{_THIN}{name} ago"
    return f"{int(passed)}{_THIN}s ago"


def moment(at: float | None) -> str:
    """ISO 8601 in UTC, for machines."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def clock_time(at: float | None) -> str:
    """The full time, for titles."""
    return ABSENT if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(octets: int | None) -> str:
    if octets is None:
        return ABSENT
    value = float(octets)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f}{_THIN}{unit}" if unit == "B" or value >= 100 else f"{value:.1f}{_THIN}{unit}"
        value /= 1024
    return f"{value:.1f}{_THIN}TiB"


def short_id(identifier: str) -> str:
    """The tail of an id: the part that differs between neighbours in time."""
    return identifier if len(identifier) <= 12 else "…" + identifier[-8:]


def words(name: str) -> str:
    """`tool_calls` → `tool calls`."""
    return name.replace("_", " ").replace(".", " ")


def attribution(rule: str) -> str:
    """What a rule of identification means; empty for what is none."""
    try:
        return AttributedBy(rule).meaning
    except ValueError:
        return ""


def fields(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    return [(name, getattr(struct, name)) for name in struct.__struct_fields__]


def pretty(value: Any) -> str:
    """JSON to read."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def heat(logprob: float) -> int:
    """0 (certain) to 8 (surprising): half a nat a step."""
    return min(8, max(0, int(-logprob * 2)))


def probability(logprob: float) -> str:
    return f"{math.exp(min(0.0, logprob)) * 100:.3g}{_THIN}%"


def model(name: str) -> str:
    """A model's name in short: the last two parts of a directory; a Hugging Face id is as short as that."""
    parts = [part for part in name.split("/") if part]
    return name if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"
