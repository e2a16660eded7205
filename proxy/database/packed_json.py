"""Packed JSON: the store's largest columns in a third of the space.

A packed value is one byte for the encoding, then the JSON as UTF-8: `0` plain, `1` a raw deflate stream with the
dictionary below. Stored values need their dictionary to be read: never change it, add another encoding instead.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

_PLAIN, _DEFLATED = b"\x00", b"\x01"
_LEVEL = 1  # zlib's fastest
_RAW = -15  # a window of 2^15 bytes; negative leaves out zlib's header and checksum
_MEMORY = 9  # zlib's largest hash table, which is faster

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
    """Return `value` as JSON in UTF-8."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError):
        # Lone surrogates and integers beyond 64 bits: the standard library, which is slower, can write them.
        return json.dumps(value).encode()


def json_text(value: Any) -> str:
    """Return `value` as JSON text, for JSON columns."""
    return json_bytes(value).decode()


def pack_json(value: Any) -> bytes:
    """Return `value` as packed JSON. Takes a few dozen microseconds."""
    text = json_bytes(value)
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY_1)
    deflated = packer.compress(text) + packer.flush()
    return _DEFLATED + deflated if len(deflated) < len(text) else _PLAIN + text


def unpack_json(packed: bytes) -> Any:
    """Return the value that `pack_json` packed. Raise ValueError for anything else."""
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
    """A column type for packed JSON; None is stored as null."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else pack_json(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else unpack_json(bytes(value))
