"""The layers of a configuration, read alike by proxy and trainer: a TOML file, and `BASE_RL_SECTION__KEY` over it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "BASE_RL_"


class UnreadableConfiguration(Exception):
    """The configuration file cannot be read. The message names the file and the reason."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the file's sections, unchecked. Raises UnreadableConfiguration."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UnreadableConfiguration(f"cannot read {path}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UnreadableConfiguration(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableConfiguration(f"{path} is not valid TOML: it is not UTF-8") from error


def environment_values(environment: Mapping[str, str], section: str) -> dict[str, Any]:
    """Return what the environment sets in `section`, as a nested mapping with keys in lower case."""
    prefix = f"{ENVIRONMENT_PREFIX}{section}__".upper()
    values: dict[str, Any] = {}
    # Sorted: the result does not depend on the order in which a shell exported the variables.
    for name, text in sorted(environment.items()):
        if name.upper().startswith(prefix):
            values = merge(values, nested(name[len(prefix) :].lower().split("__"), parse_value(text)))
    return values


def parse_value(text: str) -> Any:
    """Decode lists, tables and null, which are JSON. Return any other text as it is: the setting's type converts
    it."""
    if text == "null" or text[:1] in {"[", "{"}:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return `value` at `path`: `{"a": {"b": value}}` for `("a", "b")`."""
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings as one; where both have a key, tables are merged, and any other value of `over` wins."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def without_none(merged: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `merged` without the keys for which the patch has None: their values are the defaults again."""
    left: dict[str, Any] = {}
    for key, value in merged.items():
        if key in patch and patch[key] is None:
            continue
        below = patch.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            left[key] = without_none(value, below)
        else:
            left[key] = value
    return left
