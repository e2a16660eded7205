"""Template filters that format numbers, times and sizes for people. Pure."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.sessions.identification import AttributedBy

# Shown for an unknown value: absent is not zero.
ABSENT = "–"

_THIN = " "
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


def number(value: float | None, digits: int = 2) -> str:
    """Format with `digits` decimals for a float and none for an int, thousands separated by thin spaces."""
    if value is None or not math.isfinite(value):
        return ABSENT
    text = f"{value:,d}" if isinstance(value, int) else f"{value:,.{digits}f}"
    if text.startswith("-"):
        # A rounded "-0.00" loses its sign.
        text = "−" + text[1:] if any(character in "123456789" for character in text) else text[1:]
    return text.replace(",", _THIN)


def compact(value: float | None) -> str:
    """Format with three significant digits: 950, 1.25k, 3.4M."""
    if value is None or not math.isfinite(value):
        return ABSENT
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Values that three digits would round up to the bound already take the larger unit: "1k", never "1e+03".
        if abs(value) >= bound * 0.9995:
            return f"{value / bound:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def reward(value: float | None) -> str:
    """Format with up to three decimals and no trailing zeros: 1, 0.25, −0.333."""
    if value is None or not math.isfinite(value):
        return ABSENT
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share * 100:.0f}{_THIN}%"


def seconds(value: float | None) -> str:
    """Format a duration in at most two units: 34 ms, 1.32 s, 2 min 5 s, 3 h 12 min, 2 d 4 h."""
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
    """Format the time passed since `at` in one unit: just now, 12 s ago, 5 min ago, 3 h ago, 2 d ago."""
    if at is None:
        return ABSENT
    passed = now - at
    if passed < 1.5:  # page.js uses the same bound when it updates the text
        return "just now"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if passed >= unit:
            return f"{int(passed // unit)}{_THIN}{name} ago"
    return f"{int(passed)}{_THIN}s ago"


def moment(at: float | None) -> str:
    """Format as ISO 8601 in UTC, for `datetime` attributes."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def clock_time(at: float | None) -> str:
    """Format date and time to the second in UTC, for tooltips."""
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
    """Shorten an id to its last characters."""
    # Ids begin with their time of creation, so neighbours in a table differ only in the tail.
    return identifier if len(identifier) <= 12 else "…" + identifier[-8:]


def words(name: str) -> str:
    """Turn an identifier into words: `tool_calls` becomes `tool calls`."""
    return name.replace("_", " ").replace(".", " ")


def attribution(rule: str) -> str:
    """Explain a rule of session identification; an unknown rule gives an empty text."""
    try:
        return AttributedBy(rule).meaning
    except ValueError:
        return ""


def fields(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    return [(name, getattr(struct, name)) for name in struct.__struct_fields__]


def pretty(value: Any) -> str:
    """Format as indented JSON with sorted keys."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def heat(logprob: float) -> int:
    """Grade a log-probability from 0 (certain) to 8 (surprising) in steps of half a nat."""
    return min(8, max(0, int(-logprob * 2)))


def probability(logprob: float) -> str:
    return f"{math.exp(min(0.0, logprob)) * 100:.3g}{_THIN}%"


def model(name: str) -> str:
    """Shorten a model's directory to its last two parts; a Hugging Face id has two parts and stays whole."""
    parts = [part for part in name.split("/") if part]
    return name if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"
