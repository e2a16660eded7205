"""Counting the values of a JSON text without decoding it."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import json_size
from proxy.http.json_size import has_more_escapes, has_more_values

_TEXTS = st.text(alphabet='\\",[]{}:nua0é😀', max_size=12)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> int:
    """Count the values inside the outermost one; an empty list or object counts as two."""
    if not isinstance(value, (list, dict)):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return (len(inner) or 1) + sum(map(counted, inner))


@given(value=_VALUES, piece=st.integers(1, 40), ascii_only=st.booleans())
def test_the_count_is_exact_whatever_strings_contain_and_wherever_pieces_end(
    value: Any, piece: int, ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    with mock.patch.object(json_size, "_PIECE", piece):
        exact = counted(value)
        assert not has_more_values(text, exact)
        assert exact == 0 or has_more_values(text, exact - 1)


@given(text=st.text(alphabet='\\a"', max_size=60), piece=st.integers(1, 7), most=st.integers(0, 30))
def test_escapes_are_counted_wherever_pieces_end(text: str, piece: int, most: int) -> None:
    with mock.patch.object(json_size, "_PIECE", piece):
        assert has_more_escapes(text.encode(), most) is (text.count("\\") > most)


@given(text=st.binary(max_size=60), most=st.integers(0, 10))
def test_any_bytes_can_be_counted(text: bytes, most: int) -> None:
    assert has_more_values(text, most) in (True, False)


@pytest.mark.parametrize("text", [b'"",' * 100_000, b"[" * 100_000, b'"a,b"' * 1000, b"," * 100_000])
def test_a_text_with_far_too_many_values_is_detected_early(text: bytes) -> None:
    assert has_more_values(text, 100)
