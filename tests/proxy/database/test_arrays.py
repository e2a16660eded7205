from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.token_ids import TokenIds
from proxy.database.arrays import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs, widened_ids

IDS = st.lists(st.integers(0, 300_000) | st.integers(-(1 << 31), (1 << 31) - 1))


@given(IDS)
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert TokenIds(widened_ids(pack_ids(ids))) == ids


@given(st.lists(st.integers(0, (1 << 24) - 1), min_size=1))
def test_ids_of_any_vocabulary_take_three_bytes(ids: list[int]) -> None:
    assert len(pack_ids(ids)) == 1 + 3 * len(ids)


def test_no_ids_are_no_bytes() -> None:
    assert pack_ids(()) == b""
    assert unpack_ids(b"") == ()


@pytest.mark.parametrize("blob", [b"\x01\x00\x00\x00", b"\x03\x00", b"\x04\x00\x00\x00", b"\x00"])
def test_other_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="packed token ids"):
        unpack_ids(blob)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_come_back(logprobs: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == tuple(logprobs)
