"""JSON of the store's largest columns in a third of its space.

A packed value is one byte that says how, then the JSON as UTF-8: `0` as it is, `1` as a raw deflate stream that
starts from the dictionary below. A dictionary is part of what it packed: mend it by adding another number, never by
changing it.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

_PLAIN, _DEFLATED = b"\x00", b"\x01"
_LEVEL = 1
_RAW = -15
_MEMORY = 9

_DICTIONARY_1 = (
    b'"Error: No such file or directory""success":true,"error":null,"result":"path":"name":"content":"query":"value":'
    b'"role":"system","content":"You are a helpful assistant. "parameters":{"type":"object","properties":'
    b'"enum":["items":{"type":"string"},"default":"required":["type":"function","function":{"name":"arguments":"{\\"'
    b'"type":"integer","description":""strict":true,"additionalProperties":false,"tool_choice":"auto","stream":true,'
    b'"stream_options":{"include_usage":true},"model":"max_tokens":"max_completion_tokens":"temperature":1.0,"top_p":1.0,'
    b'"tools":[{"type":"function","function":{"name":"reasoning":"token_ids":"logprobs":"reasoning_tokens":"stopped_by":'
    b'"siblings":["type":"text","text":"role":"assistant","content":"tool_calls":[{"id":"call_","type":"function"}}]}'
    b'[{"role":"system","content":"[{"role":"user","content":"[{"role":"tool","tool_call_id":"call_"content":"}]'
    b'{"turn_id":"turn_01","session_id":"ses_01","model":"policy","run_name":"policy","created":17'
    b',"prompt_tokens":"cached_tokens":"choices":[{"turn_id":"turn_01","text":"","tool_calls":[{"id":"call_'
    b'","call":{"name":"","arguments":"{\\"}"}}],"finish_reason":"length","finish_reason":"tool_calls",'
    b'"finish_reason":"stop","completion_tokens":"version":,"completed":17}]}'
)


def json_bytes(value: Any) -> bytes:
    """As UTF-8. What is no UTF-8 or no 64 bits is written by the slower way that can."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return json.dumps(value).encode()


def json_text(value: Any) -> str:
    """For JSON columns."""
    return json_bytes(value).decode()


def pack_json(value: Any) -> bytes:
    """A JSON value in as little space as a few dozen microseconds can."""
    text = json_bytes(value)
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY_1)
    deflated = packer.compress(text) + packer.flush()
    return _DEFLATED + deflated if len(deflated) < len(text) else _PLAIN + text


def unpack_json(packed: bytes) -> Any:
    """Raises ValueError for what `pack_json` did not make."""
    how, body = packed[:1], packed[1:]
    if how == _DEFLATED:
        try:
            body = zlib.decompressobj(_RAW, _DICTIONARY_1).decompress(body)
        except zlib.error as error:
            raise ValueError(f"packed JSON is damaged: {error}") from error
    elif how != _PLAIN:
        raise ValueError(f"packed JSON of a kind that this version does not know: {how!r}")
    return json.loads(body)


class PackedJson(TypeDecorator[Any]):
    """A column of packed JSON; null stays null."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else pack_json(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else unpack_json(bytes(value))
