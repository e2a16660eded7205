"""Functions in the user's own files: the configuration names file and function, and the file's SHA-256 is
recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

KEYS = ("loss", "advantage", "filter")
"""The parts of an algorithm that a user may write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFunction:
    """The function `name` of the Python file `file`, with the SHA-256 of its content as it was configured."""

    file: str
    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def _referred(value: Any) -> Any:
    """Read the file that "FILE.py:NAME" names. Raises ValueError for another text, and if there is no such file."""
    if not isinstance(value, str):
        return value
    file, _, name = value.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f'{value!r} names no function: write "FILE.py:NAME", for example "my_file.py:loss"')
    path = Path(file).expanduser().absolute()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    return UserFunction(file=str(path), name=name, sha256=hashlib.sha256(content).hexdigest())


FunctionInFile = Annotated[UserFunction, BeforeValidator(_referred)]
"""A function that a configuration names as "FILE.py:NAME" and a step's record by the fields of `UserFunction`."""


def functions_in(parts: object) -> dict[str, UserFunction]:
    """Return the user's own functions of an algorithm, or of its settings, by algorithm part."""
    return {key: function for key in KEYS if (function := getattr(parts, key)) is not None}


def anchored(section: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a `[trainer]` section, or that of one run, with the relative paths of the user's own functions resolved
    against the `directory` of the configuration file, so that they do not depend on where the trainer is started."""
    found = dict(section)
    algorithm = section.get("algorithm")
    if isinstance(algorithm, Mapping):
        found["algorithm"] = {
            key: str(directory / Path(value).expanduser()) if key in KEYS and isinstance(value, str) else value
            for key, value in algorithm.items()
        }
    runs = section.get("runs")
    if isinstance(runs, Mapping):
        found["runs"] = {
            name: anchored(own, directory) if isinstance(own, Mapping) else own for name, own in runs.items()
        }
    return found


def without_directories(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an algorithm as JSON, with the file names of the user's own functions but not their
    directories: the mathematics does not depend on those, and the record does not reveal the machine's layout."""
    return {
        key: {**value, "file": Path(value["file"]).name} if key in KEYS and value is not None else value
        for key, value in parts.items()
    }
