"""The fields of limits in forms. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.errors import InvalidRequest

LABELS = {
    "calls_per_minute": ("Calls per minute", "empty: no limit"),
    "tokens_per_minute": ("Tokens per minute", "empty: no limit"),
    "tokens_per_day": ("Tokens per day", "a budget, UTC; empty: none"),
    "tokens_per_month": ("Tokens per month", "a budget, UTC; empty: none"),
}
"""The limits that forms show, with their labels and hints. `burst_seconds` stays as it is."""


def limit_texts(limits: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the texts of the fields for stored limits."""
    return {name: str((limits or {}).get(name, "")) for name in LABELS}


def limits_in(form: Mapping[str, str], known: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the limits that a form asks for; None without any. Raise InvalidRequest for a text that is no number."""
    given: dict[str, Any] = {}
    for name, (label, _hint) in LABELS.items():
        text = form.get(name, "").strip().replace(",", "").replace("_", "")
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:17]) <= 10**15:
            raise InvalidRequest(f"{label} is a whole number from 1, or empty", param=name)
        given[name] = int(text)
    if given and known and "burst_seconds" in known:
        given["burst_seconds"] = known["burst_seconds"]
    return given or None
