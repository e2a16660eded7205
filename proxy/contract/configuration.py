"""The layers of a configuration, read alike by proxy and trainer: a TOML file, and `BASE_RL_SECTION__KEY` over it.

`BASE_RL_SECTION__KEY_FILE` names a file that holds the value of `KEY`. Secrets are given so, because child processes
inherit the environment and `docker inspect` shows it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "BASE_RL_"
FILE_SUFFIX = "_FILE"
"""The name of no setting may end like this."""

# Far longer than any secret. A longer file was named by mistake, and may have no end, as a device.
_MOST_FILE_BYTES = 65_536


class UnreadableConfiguration(Exception):
    """The configuration file, or a file that a variable names, cannot be read. The message has its path and why."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the file's sections, unchecked. Raise UnreadableConfiguration."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UnreadableConfiguration(f"cannot read {path}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UnreadableConfiguration(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableConfiguration(f"{path} is not valid TOML: it is not UTF-8") from error


def environment_values(environment: Mapping[str, str], section: str) -> dict[str, Any]:
    """Return what the environment sets in `section`, as a nested mapping with keys in lower case.

    `KEY_FILE` is ignored if `KEY` is set as well. Raise UnreadableConfiguration if the file that it names cannot be
    read, is empty, or is too large.
    """
    prefix = f"{ENVIRONMENT_PREFIX}{section}__".upper()
    given = {name: text for name, text in environment.items() if name.upper().startswith(prefix)}
    set_directly = {name.upper() for name in given}
    values: dict[str, Any] = {}
    # Sorted: the result does not depend on the order in which a shell exported the variables.
    for name, text in sorted(given.items()):
        key, value = name.upper(), text
        if key.endswith(FILE_SUFFIX):
            key = key.removesuffix(FILE_SUFFIX)
            # `base-rl up` gives its proxy the resolved values, beside the variables that it was started with.
            if key in set_directly:
                continue
            value = _text_of(Path(text), name)
        values = merge(values, nested(key[len(prefix) :].lower().split("__"), parse_value(value)))
    return values


def _text_of(path: Path, variable: str) -> str:
    """Return the text of the file that `variable` names, without the newlines at its end."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except OSError as error:
        raise UnreadableConfiguration(f"{variable}: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UnreadableConfiguration(f"{variable}: {path} is not UTF-8 text") from error
    if not text:
        raise UnreadableConfiguration(f"{variable}: {path} is empty; write the value into it")
    if len(content) > _MOST_FILE_BYTES:
        raise UnreadableConfiguration(f"{variable}: {path} has more than {_MOST_FILE_BYTES} bytes; name another file")
    return text


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
