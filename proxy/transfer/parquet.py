"""Session records as rows of Parquet files. Needs pyarrow, an optional dependency.

Values without a fixed shape (metadata, requests, responses, sampling, tools) are columns of JSON text. `messages` has
the columns that readers of chat data expect.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy.contract.export import plain_spans
from proxy.database.packed_json import json_text
from proxy.transfer.conversation import messages_of
from proxy.transfer.records import InvalidRecord, SessionRecord, check

# Rows of a batch, which is in memory as Python objects.
_READ_AT_ONCE = 16
_JSON_OF_SESSION = ("metadata", "tools")
_JSON_OF_TURN = ("sampling", "messages", "request", "response")


class ParquetNotInstalled(Exception):
    def __init__(self) -> None:
        super().__init__(
            "Parquet needs pyarrow: use --format jsonl, or in the clone pip install -c constraints.txt -e '.[export]'"
        )


class RecordWriter:
    """Writes records to one file or sink. Without `close`, which writes the footer, the file is not valid."""

    def __init__(self, sink: Any) -> None:
        """Raise ParquetNotInstalled if pyarrow is missing."""
        self._arrow = _arrow()
        self._schema = _schema(self._arrow)
        self._writer = _module("pyarrow.parquet").ParquetWriter(sink, self._schema, compression="zstd")

    def write(self, records: Sequence[SessionRecord]) -> None:
        """Write the records as one row group."""
        rows = [_row(record) for record in records]
        self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def read_records(path: Path) -> Iterator[SessionRecord]:
    """Yield the records of a Parquet file. Raise ParquetNotInstalled, or InvalidRecord for an invalid file or row."""
    arrow = _arrow()
    number = 0
    try:
        with _module("pyarrow.parquet").ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_READ_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield _record(row)
    except (arrow.ArrowInvalid, InvalidRecord) as error:
        raise InvalidRecord(f"row {number}: {error}" if number else f"not a Parquet file: {error}") from error


def is_installed() -> bool:
    try:
        _arrow()
    except ParquetNotInstalled:
        return False
    return True


def _arrow() -> Any:
    return _module("pyarrow")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ParquetNotInstalled from error


def _schema(arrow: Any) -> Any:
    text, number, real, ids = arrow.string(), arrow.int32(), arrow.float64(), arrow.list_(arrow.int32())
    function = arrow.struct({"name": text, "arguments": text})
    call = arrow.struct({"id": text, "type": text, "function": function})
    message = arrow.struct(
        {
            "role": text,
            "content": text,
            "reasoning_content": text,
            "name": text,
            "tool_call_id": text,
            "tool_calls": arrow.list_(call),
        }
    )
    turn = arrow.struct(
        {
            "id": text,
            "parent": number,
            "prefix_tokens": number,
            "prompt_ids": ids,
            "output_ids": ids,
            # The store has float32 too, so nothing is lost.
            "logprobs": arrow.list_(arrow.float32()),
            "versions": arrow.list_(arrow.struct({"version": number, "start": number, "end": number})),
            "masked": arrow.list_(arrow.struct({"start": number, "end": number})),
            **dict.fromkeys(("sampling", "finish_reason", "continuation", "state", "attributed_by"), text),
            "prompt_token_count": number,
            **dict.fromkeys(("started_at", "first_token_at", "finished_at"), real),
            **dict.fromkeys(("conversation_hash", "settled_hash", "tools_hash"), text),
            **dict.fromkeys(("messages", "request", "response"), text),
            "reward": real,
        }
    )
    reward = arrow.struct(
        {
            "id": text,
            "turn": number,
            "name": text,
            "value": real,
            "source": text,
            "comment": text,
            "after_training": arrow.bool_(),
            "created_at": real,
        }
    )
    texts = ("format", "session_id", "run", "origin", "external_id", "group", "task", "purpose", "metadata")
    states = ("attributed_by", "state", "training", "outcome", "end_reason")
    return arrow.schema(
        {
            "messages": arrow.list_(message),
            "tools": text,
            "reward": real,
            **dict.fromkeys(texts, text),
            "group_size": number,
            **dict.fromkeys(states, text),
            "consumed_by": number,
            **dict.fromkeys(("created_at", "last_active_at", "ended_at"), real),
            "turns": arrow.list_(turn),
            "rewards": arrow.list_(reward),
        }
    )


def _row(record: SessionRecord) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(record)
    row["messages"] = [_message(message) for message in row["messages"]]
    _as_text(row, _JSON_OF_SESSION)
    for turn in row["turns"]:
        _as_text(turn, _JSON_OF_TURN)
        turn["versions"] = [dict(zip(("version", "start", "end"), span, strict=True)) for span in turn["versions"]]
        turn["masked"] = [dict(zip(("start", "end"), span, strict=True)) for span in turn["masked"]]
    return row


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with exactly the columns that readers of chat data expect."""
    columns: dict[str, Any] = {
        key: _plain(message.get(key)) for key in ("role", "content", "reasoning_content", "name", "tool_call_id")
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        columns["tool_calls"] = [_call(call) for call in calls if isinstance(call, dict)]
    return columns


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    parts = function if isinstance(function, dict) else {}
    named = {"name": _plain(parts.get("name")), "arguments": _plain(parts.get("arguments"))}
    return {"id": _plain(call.get("id")), "type": _plain(call.get("type")), "function": named}


def _plain(value: Any) -> str | None:
    """Return a value as text: the parts of a content list joined, anything but text as JSON."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if value is None:
        return None
    text = value if isinstance(value, str) else json_text(value)
    # Half of a surrogate pair, which JSON can hold, cannot be encoded as UTF-8.
    return text.encode("utf-8", "replace").decode()


def _as_text(row: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        row[name] = json_text(row[name]) if row[name] is not None else None


def _record(row: dict[str, Any]) -> SessionRecord:
    try:
        _as_value(row, _JSON_OF_SESSION)
        for turn in row.get("turns") or ():
            _as_value(turn, _JSON_OF_TURN)
            plain_spans(turn)
        record = msgspec.convert({**row, "messages": []}, SessionRecord)
    except ValueError as error:
        raise InvalidRecord(str(error)) from error
    except (KeyError, TypeError) as error:
        raise InvalidRecord(f"this row is not a session: {error!r}") from error
    check(record)
    # The columns of `messages` have lost what readers do not expect, so the messages are derived from the turns.
    return msgspec.structs.replace(record, messages=messages_of(record.turns))


def _as_value(row: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        text = row.get(name)
        row[name] = json.loads(text) if isinstance(text, str) else None
