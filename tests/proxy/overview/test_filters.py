from __future__ import annotations

from urllib.parse import unquote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.overview.filters import Cursor


@given(st.floats(allow_nan=False, allow_infinity=False), st.from_regex(r"[a-z0-9_~]+", fullmatch=True))
def test_a_cursor_survives_the_wire(at: float, key: str) -> None:
    sent = Cursor(at=at, key=key).encode()
    assert unquote_plus(sent) == sent  # as written in an address
    assert Cursor.decode(sent) == Cursor(at=at, key=key)


@pytest.mark.parametrize("text", ["", "x", "0x1p0", "0x1p0~", "~key", "0x1p99999~key"])
def test_an_invented_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Cursor.decode(text)
    assert refusal.value.param == "cursor"
