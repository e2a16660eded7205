from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.arrays import (
    count_ids,
    count_logprobs,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
    widened_ids,
)
from proxy.contract.token_ids import TokenIds

IDS = st.lists(st.integers(0, 300_000) | st.integers(-(1 << 31), (1 << 31) - 1))


@given(IDS)
def test_ids_are_restored(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert TokenIds(widened_ids(pack_ids(ids))) == ids
    assert count_ids(pack_ids(ids)) == len(ids)


@given(st.lists(st.integers(0, (1 << 18) - 1), min_size=1))
def test_ids_of_vocabularies_in_use_take_two_bytes_and_a_quarter(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 1 + 2 * len(ids) + -(-len(ids) // 4)
    assert unpack_ids(packed) == tuple(ids)


@given(st.lists(st.integers(0, (1 << 24) - 1)), st.integers(1 << 18, (1 << 24) - 1))
def test_ids_of_any_vocabulary_take_three_bytes(ids: list[int], large: int) -> None:
    assert len(pack_ids([*ids, large])) == 1 + 3 * len([*ids, large])
    assert unpack_ids(pack_ids([*ids, large])) == (*ids, large)


def test_how_they_are_laid_out() -> None:
    assert pack_ids([1, 0x203FF, 0x3FFFF]) == bytes([2, *(1, 0, 0xFF, 3, 0xFF, 0xFF), 0b11_10_00])
    assert pack_ids([1, 1 << 18]) == bytes([3, *(1, 0, 0), *(0, 0, 4)])
    assert pack_ids([-1]) == bytes([4, *(255, 255, 255, 255)])


def test_no_ids_are_packed_as_no_bytes() -> None:
    assert pack_ids(()) == b""
    assert unpack_ids(b"") == ()


@pytest.mark.parametrize(
    "blob",
    [
        b"\x01\x00\x00\x00",
        b"\x02",
        b"\x02\x00",
        b"\x02\x00\x00",
        b"\x02" + 6 * b"\0",
        b"\x03\x00",
        b"\x04\x00\x00\x00",
        b"\x00",
    ],
)
def test_other_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="packed token ids"):
        unpack_ids(blob)
    with pytest.raises(ValueError, match="packed token ids"):
        count_ids(blob)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_are_restored(logprobs: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == tuple(logprobs)
    assert count_logprobs(pack_logprobs(logprobs)) == len(logprobs)


def test_half_a_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match="packed log-probabilities"):
        count_logprobs(b"\0" * 6)
