"""The form of a run's settings: its fields, the settings they stand for, and the errors beside them. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from proxy.errors import InvalidRequest
from proxy.settings import RunSettings

Kind = Literal["text", "whole", "number", "choice"]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """A form field for the setting at `path`; an empty field means the default. `help` explains the setting."""

    path: tuple[str, ...]
    label: str
    kind: Kind
    help: str = ""
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the form field, and of the setting: `sampling.temperature`."""
        return ".".join(self.path)

    @property
    def default(self) -> str:
        """The default value as the form shows it; empty for no bound."""
        return _as_text(_value_at(_DEFAULTS, self.path))


FIELDS = (
    Field(
        path=("weights",), label="Weights", kind="choice", choices=("full", "adapter"),
        help="adapter: each version is a LoRA adapter, which an engine holds beside those of other runs",
    ),
    Field(
        path=("sampling", "mode"), label="Sampling", kind="choice", choices=("raise_greedy", "respect", "override"),
        help="how the sampling that agents ask for is changed in training sessions",
    ),
    Field(path=("sampling", "temperature"), label="Temperature", kind="number", help="above 0"),
    Field(path=("max_new_tokens",), label="Tokens per answer", kind="whole", help="at most"),
    Field(path=("limits", "calls_per_minute"), label="Calls per minute", kind="whole", help="empty: no limit"),
    Field(path=("limits", "tokens_per_minute"), label="Tokens per minute", kind="whole", help="empty: no limit"),
    Field(path=("limits", "tokens_per_day"), label="Tokens per day", kind="whole", help="a budget; empty: none"),
    Field(path=("limits", "tokens_per_month"), label="Tokens per month", kind="whole", help="a budget; empty: none"),
    Field(
        path=("limits", "max_waiting"), label="Waiting trajectories", kind="whole",
        help="while more of them wait for the trainer, no training session is opened; empty: no limit",
    ),
    Field(path=("limits", "share"), label="Share", kind="number", help="weight beside other runs of its engine"),
    Field(
        path=("session_idle_seconds",), label="Idle session ends after", kind="number", help="seconds without a call"
    ),
    Field(
        path=("reward_timeout_seconds",), label="Wait for a reward", kind="number",
        help="seconds after the end of a session",
    ),
    Field(path=("lease_seconds",), label="Lease of a claim", kind="number", help="seconds, renewed by the trainer"),
)  # fmt: skip
_DEFAULTS = RunSettings().model_dump(mode="json")
# Settings that are fields of their own, outside of `FIELDS`.
_BESIDE = {"name", "model", "begin_from"}
MORE = "more"
"""The name of the form field with the settings that have no field, as JSON."""


def stored_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without name and model."""
    return settings.model_dump(mode="json", exclude_defaults=True, exclude=_BESIDE)


def values_of(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the form fields for settings that differ from their defaults."""
    rest: dict[str, Any] = json.loads(json.dumps(stored))
    values = {field.name: _as_text(_taken(rest, field.path)) for field in FIELDS}
    return values | {MORE: json.dumps(rest, indent=2, ensure_ascii=False) if rest else ""}


def settings_of(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a filled form stands for; defaults are left out. Raise InvalidRequest that names the
    field."""
    settings = _more(form.get(MORE, ""))
    for field in FIELDS:
        text = form.get(field.name, "").strip()
        # Every choice is sent with the form. The default is left out, so that a run that begins from another's
        # version can take its kind of weights.
        if not text or (field.kind == "choice" and text == field.default):
            continue
        if _value_at(settings, field.path) is not None:
            raise InvalidRequest(
                f"settings.{MORE}: {field.name} has a field of its own: leave it out here", param=f"settings.{MORE}"
            )
        table = settings
        for key in field.path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise InvalidRequest(f"settings.{MORE}: {key} must be an object", param=f"settings.{MORE}")
        table[field.path[-1]] = _parsed(field, text)
    return settings


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that makes `after` of `before`; neither contains None."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if below := merge_patch(old, value):
                patch[key] = below
        elif key not in before or old != value or type(old) is not type(value):
            patch[key] = value
    return patch


def errors_of(error: InvalidRequest, fields: frozenset[str]) -> dict[str, str]:
    """Return the error by the form field it belongs to: one of `fields`, `more`, or an empty text for the form."""
    param = (error.param or "").removeprefix("settings.")
    name = param if param in fields else MORE if (error.param or "").startswith("settings.") else ""
    return {name: error.message}


def _more(text: str) -> dict[str, Any]:
    """Parse the settings that have no field."""
    if not text.strip():
        return {}
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"this is not valid JSON: {error}", param=f"settings.{MORE}") from error
    if not isinstance(settings, dict):
        raise InvalidRequest('write a JSON object, such as {"trainer": {}}', param=f"settings.{MORE}")
    return settings


def _parsed(field: Field, text: str) -> Any:
    if field.kind not in ("whole", "number"):
        return text
    try:
        # The page prints thin spaces, and many keyboards type a decimal comma.
        number = float(text.replace("\u2009", "").replace(",", "."))
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (field.kind == "whole" and number != int(number)):
        what = "a whole number" if field.kind == "whole" else "a number"
        raise InvalidRequest(f"{text[:40]!r} is not {what}", param=f"settings.{field.name}")
    return int(number) if field.kind == "whole" else number


def _value_at(settings: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path; None if there is none."""
    value: Any = settings
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _taken(settings: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Remove the value at a path and return it; None if there is none."""
    if len(path) == 1:
        return settings.pop(path[0], None)
    below = settings.get(path[0])
    if not isinstance(below, dict):
        return None
    value = _taken(below, path[1:])
    if not below:
        del settings[path[0]]
    return value


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
