from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.database.packed_json import json_bytes, pack_json, unpack_json

STORED = "0143c40c46a4856724962864162b98299464e6a6162b98db03e30500"

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(VALUES)
def test_packing_and_unpacking_returns_the_value(value: Any) -> None:
    assert unpack_json(pack_json(value)) == json.loads(json.dumps(value))
    assert json.loads(json_bytes(value)) == json.loads(json.dumps(value))


def test_lone_surrogates_survive_packing() -> None:
    value = {"content": "\ud800 alone"}
    assert unpack_json(pack_json(value)) == value


@given(st.text(max_size=200))
def test_a_packed_value_is_at_most_one_byte_longer_than_the_plain_one(text: str) -> None:
    assert len(pack_json(text)) <= len(json_bytes(text)) + 1


def test_an_answer_takes_little_more_than_its_text() -> None:
    answer = {
        "turn_id": "turn_01kanq5v3y8x2b7m4c6d9e0f1g",
        "session_id": "ses_01kanq5v3y8x2b7m4c6d9e0f1h",
        "model": "policy",
        "run_name": "policy",
        "created": 1_763_000_000,
        "prompt_tokens": 410,
        "cached_tokens": 300,
        "choices": [
            {
                "turn_id": "turn_01kanq5v3y8x2b7m4c6d9e0f1g",
                "text": "42",
                "finish_reason": "stop",
                "completion_tokens": 3,
                "version": 12,
                "completed": 1_763_000_001,
            }
        ],
    }
    assert len(pack_json(answer)) < len(json_bytes(answer)) / 2.5


def test_values_packed_by_earlier_versions_can_be_read() -> None:
    """Bytes of an earlier version: the dictionary must never change."""
    stored = bytes.fromhex(STORED)
    assert unpack_json(stored) == [{"role": "user", "content": "What is 6 times 7?"}]
    assert unpack_json(b"\x00[]") == []


@pytest.mark.parametrize("packed", [b"", b"\x07[]", b"\x01\xff\xff\xff", b"\x00{"])
def test_damaged_values_are_a_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (of several kinds)
        unpack_json(packed)


def test_other_programs_can_read_the_deflate_stream_with_the_dictionary() -> None:
    packed = pack_json([{"role": "user", "content": "x" * 500}])
    with pytest.raises(zlib.error):
        zlib.decompress(packed[1:], -15)
