"""Rows of users' JSONL and Parquet files, each with the number by which errors name it."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import NothingToFit

JSONL, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
# Rows that are read from a Parquet file at a time; it bounds the memory that they take.
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row. `number` is the line of a JSONL file or the row of a Parquet file; both count from 1."""

    file: str
    number: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}, row {self.number}"


def rows_of(path: Path) -> Iterator[Row]:
    """Read a file row by row. Raises NothingToFit for a file that is missing, empty or of another kind, and for a
    broken row."""
    if not path.is_file():
        raise NothingToFit(f"{path}: there is no such file; name a .jsonl or a .parquet file")
    if path.suffix in JSONL:
        found = _lines(path)
    elif path.suffix in PARQUET:
        found = _parquet_rows(path)
    else:
        raise NothingToFit(f"{path}: name a .jsonl file, one JSON object a line, or a .parquet file")
    empty = True
    for row in found:
        empty = False
        yield row
    if empty:
        raise NothingToFit(f"{path}: there are no rows in it")


def sha256_of(path: Path) -> str:
    """Return the file's digest. Raises NothingToFit for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NothingToFit(f"cannot read {path}: {error.strerror or error}") from error


def without_nulls(value: Any) -> Any:
    """Return the value without null members, because Parquet gives all messages of a file the same members."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _lines(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if text:
                    yield Row(file=path.name, number=number, values=_object(text, f"{path.name}, line {number}"))
    except OSError as error:
        raise NothingToFit(f"cannot read {path}: {error.strerror or error}") from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NothingToFit(f"{place}: this is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NothingToFit(f"{place}: a row is a JSON object, and this is a {type(value).__name__}")
    return value


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        remedy = "in the clone, pip install -c constraints.txt -e '.[export]', or write the rows as .jsonl"
        raise NothingToFit(f"{path}: Parquet needs pyarrow: {remedy}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(file=path.name, number=number, values=values)
    except (OSError, arrow.ArrowException) as error:
        raise NothingToFit(f"{path}: cannot be read as Parquet after row {number}: {error}") from error
