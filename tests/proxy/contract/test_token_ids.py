from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.token_ids import TokenIds

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
FEW = st.lists(st.integers(0, 3), max_size=8)


@given(st.lists(IDS, max_size=4))
def test_appended_or_at_once_the_ids_are_the_same(parts: list[list[int]]) -> None:
    whole, grown = [token for part in parts for token in part], TokenIds()
    for part in parts:
        grown += part
    assert grown == TokenIds.of(whole) == whole
    assert hash(grown) == hash(tuple(whole))
    assert json.loads(grown.json) == json.loads(TokenIds.of(whole).json) == json.loads(TokenIds(grown.packed).json)
    assert json.loads(grown.json) == list(grown) == whole
    assert len(grown) == len(whole)


@given(IDS, st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none(), st.sampled_from([None, 1, 2, -1]))
def test_a_slice_is_that_of_the_list(ids: list[int], start: int | None, stop: int | None, step: int | None) -> None:
    part = TokenIds.of(ids)[start:stop:step]
    assert part == ids[start:stop:step]
    assert json.loads(part.json) == ids[start:stop:step]


@given(IDS, st.integers(-9, 9))
def test_an_index_is_that_of_the_list(ids: list[int], index: int) -> None:
    try:
        expected = ids[index]
    except IndexError:
        with pytest.raises(IndexError):
            TokenIds.of(ids)[index]
    else:
        assert TokenIds.of(ids)[index] == expected


@given(FEW, FEW)
def test_the_common_prefix_is_the_longest(left: list[int], right: list[int]) -> None:
    length = TokenIds.of(left).common_prefix(TokenIds.of(right))
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


@given(st.lists(st.integers(0, 2**17), max_size=8), st.integers(0, 2**17))
def test_it_contains_the_elements_of_the_list(ids: list[int], other: int) -> None:
    token_ids = TokenIds.of(ids)
    assert all(token in token_ids for token in ids)
    assert (other in token_ids) is (other in ids)
    assert (other * 256 % 2**31 in token_ids) is (other * 256 % 2**31 in ids)
    assert not token_ids.__contains__("1")


@given(ids=FEW, more=FEW, cut=st.integers(0, 8), asked=FEW)
def test_a_cached_absence_is_an_absence(ids: list[int], more: list[int], cut: int, asked: list[int]) -> None:
    first = TokenIds.of(ids)
    for token in asked:
        assert (token in first) is (token in ids)
    grown = first + TokenIds.of(more)
    for token in [*asked, *more]:
        assert (token in grown) is (token in ids + more)
        assert (token in grown[:cut]) is (token in (ids + more)[:cut])
        assert (token in first) is (token in ids)
    assert first.has_any(frozenset(asked)) is bool(set(asked) & set(ids))
    assert grown.has_any(frozenset(asked)) is bool(set(asked) & set(ids + more))


@given(FEW, FEW)
def test_they_are_equal_where_lists_are(left: list[int], right: list[int]) -> None:
    assert (TokenIds.of(left) == right) is (left == right)
    assert (TokenIds.of(left) == tuple(right)) is (left == right)
    assert TokenIds.of(left) != "text"
