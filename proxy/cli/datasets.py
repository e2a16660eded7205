"""Exported sessions as a folder in the Hugging Face layout, and back.

    DIR/README.md                          the dataset's card
    DIR/data/train-00000-of-00002.parquet  … or .jsonl

Files are written under temporary names and renamed when all of them are complete. The card comes last: a folder with
a card is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from proxy.cli.console import Refused
from proxy.contract.export import PREFERENCE_FORMAT
from proxy.private_files import make_directory, open_file
from proxy.transfer.parquet import RecordWriter, read_records
from proxy.transfer.preferences import PreferenceRecord, decode_preference
from proxy.transfer.records import InvalidRecord, SessionRecord, decode, encode

_SHARD_BYTES = 256 << 20
_GROUP_BYTES = 8 << 20
_GROUP_SESSIONS = 256


class _Shard(Protocol):
    def add(self, line: bytes, record: SessionRecord | PreferenceRecord) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class _Lines:
    def __init__(self, path: Path) -> None:
        self._file = open_file(path, "wb")

    def add(self, line: bytes, _record: SessionRecord | PreferenceRecord) -> None:
        self._file.write(line + b"\n")

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        _finish(self._file)


class _Rows:
    def __init__(self, path: Path) -> None:
        self._file = open_file(path, "wb")
        self._writer = RecordWriter(self._file)
        self._group: list[SessionRecord] = []
        self._bytes = 0

    def add(self, line: bytes, record: SessionRecord | PreferenceRecord) -> None:
        assert isinstance(record, SessionRecord), "preferences have no columns"
        self._group.append(record)
        self._bytes += len(line)
        if self._bytes >= _GROUP_BYTES or len(self._group) >= _GROUP_SESSIONS:
            self._write()

    def size(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._write()
        self._writer.close()
        _finish(self._file)

    def _write(self) -> None:
        if self._group:
            self._writer.write(self._group)
            self._group, self._bytes = [], 0


class DatasetWriter:
    """Writes the files of a dataset: call `add` for each record, then `finish`, or `abandon` to remove everything."""

    def __init__(
        self, directory: Path, *, suffix: str, preferences: bool = False, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        """`suffix` is parquet or jsonl; for `preferences`, jsonl. Raises Refused for a folder that is not empty, and
        ParquetNotInstalled."""
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise Refused(f"{directory} is there and not empty: name another folder")
        self._made = not directory.exists()
        self._directory = directory
        self._suffix = suffix
        self._preferences = preferences
        self._shard_bytes = shard_bytes
        self._partial = directory / ".partial"
        make_directory(directory)  # private: the user decides who else may read the records
        make_directory(self._partial)
        self._paths: list[Path] = []
        self._shard: _Shard | None = None
        self.records = self.turns = 0
        self._next()

    def add(self, line: bytes) -> None:
        """Write a record, which is JSON without the end of the line. Raises InvalidRecord."""
        record = decode_preference(line) if self._preferences else decode(line)
        if self._shard is None:
            self._next()
        assert self._shard is not None
        self._shard.add(line, record)
        self.records += 1
        self.turns += len(record.turns) if isinstance(record, SessionRecord) else 0
        if self._shard.size() >= self._shard_bytes:
            self._shard.close()
            self._shard = None

    def finish(self, run: str) -> list[Path]:
        """Rename the files to their final names, write the card, and return the files."""
        if self._shard is not None:
            self._shard.close()
        card = self._partial / "README.md"
        if self._preferences:
            card.write_text(_preferences_card(run, self.records))
        else:
            card.write_text(_card(run, self._suffix, self.records, self.turns))
        data = self._directory / "data"
        make_directory(data)
        count = len(self._paths)
        final = [data / f"train-{index:05}-of-{count:05}.{self._suffix}" for index in range(count)]
        for path, name in zip(self._paths, final, strict=True):
            path.replace(name)
        card.replace(self._directory / "README.md")
        self._partial.rmdir()
        return final

    def abandon(self) -> None:
        if self._shard is not None:
            self._shard.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        if self._made:
            self._directory.rmdir()

    def _next(self) -> None:
        path = self._partial / f"{len(self._paths)}.{self._suffix}"
        self._shard = _Rows(path) if self._suffix == "parquet" else _Lines(path)
        self._paths.append(path)


def lines_of(source: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the records of a file or of an exported folder: file, line (or row) and the record as JSON.

    Raises Refused for a path without records, InvalidRecord for a Parquet row that is not a record, and
    ParquetNotInstalled.
    """
    for path in _files(source):
        if path.suffix == ".parquet":
            try:
                for number, record in enumerate(read_records(path), 1):
                    yield str(path), number, encode(record).rstrip(b"\n")
            except InvalidRecord as error:
                raise InvalidRecord(f"{path}: {error}") from error
        else:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield str(path), number, line.rstrip(b"\r\n")


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in (".parquet", ".jsonl"):
            raise Refused(f"{source} is neither .jsonl nor .parquet")
        return [source]
    if not source.is_dir():
        raise Refused(f"there is no {source}")
    folder = source / "data" if (source / "data").is_dir() else source
    found = sorted(path for path in folder.iterdir() if path.suffix in (".parquet", ".jsonl"))
    if not found:
        raise Refused(f"{source} holds no .jsonl and no .parquet file, and neither does {source / 'data'}")
    return found


def is_preference(line: bytes) -> bool:
    """Return whether a line is a preference; every other line is taken for a session."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("format") == PREFERENCE_FORMAT


def _finish(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _card(run: str, suffix: str, sessions: int, turns: int) -> str:
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.{suffix}
tags:
- base-rl
- agent-trajectories
---

# Sessions of the run `{run}`

{sessions} sessions with {turns} model calls, exported by base-rl. One row is one session.

| column | what it holds |
| --- | --- |
| `messages`, `tools` | the conversation of the last answer, in the shape of chat completions |
| `reward` | the combined reward; null where none was given |
| `rewards` | the ledger, entry by entry, in order of arrival |
| `turns` | every model call, with exact token ids |
| `session_id`, `group`, `task`, `purpose`, `metadata`, `state`, `training`, … | what else is known of the session |

A turn's `parent` is an index into `turns`; its full prompt is the first `prefix_tokens` ids of its parent's prompt
and output, then `prompt_ids`. `logprobs` belong to `output_ids`, `versions` say which policy version produced which
of them, and `masked` spans were redacted.

`metadata`, `tools` and a turn's `sampling`, `messages`, `request` and `response` are JSON as text in Parquet.
`base-rl import` takes this folder.
"""


def _preferences_card(run: str, preferences: int) -> str:
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.jsonl
tags:
- base-rl
- preferences
---

# Preferences of the run `{run}`

{preferences} preferences, exported by base-rl. One line is one preference.

| field | what it holds |
| --- | --- |
| `chosen`, `rejected` | what went better and what went worse: a session or, with `turn_id`, one of its turns |
| `chosen.messages`, … | its conversation, in the shape of chat completions |
| `chosen.turns`, … | its model calls with exact token ids; `preferred` marks those that the preference is about |
| `source`, `comment`, `created_at`, `id` | who said so, why and when |

A turn's `parent` is an index into its side's `turns`; its full prompt is the first `prefix_tokens` ids of its
parent's prompt and output, then `prompt_ids`. `masked` spans were redacted.

Import them with `base-rl import`, after the sessions that they are about; train on them with
`base-rl fit dpo` or `base-rl fit reward-model`.
"""
