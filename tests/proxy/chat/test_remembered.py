"""Beginnings of lists, known by their bytes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.chat.remembered import Remembered


def raws(*texts: str) -> list[msgspec.Raw]:
    return [msgspec.Raw(text.encode()) for text in texts]


def test_the_longest_known_beginning_is_found() -> None:
    remembered: Remembered[str] = Remembered()
    remembered.keep(b"", raws("1"), "one")
    remembered.keep(b"", raws("1", "2", "3"), "three")
    assert remembered.beginning(b"", raws("1", "2")) == (1, "one")
    assert remembered.beginning(b"", raws("1", "2", "3")) == (3, "three")
    assert remembered.beginning(b"", raws("1", "2", "3", "4")) == (3, "three")
    assert remembered.beginning(b"", raws("2", "1")) is None
    assert remembered.beginning(b"x", raws("1")) is None


def test_long_lists_are_looked_at_near_their_end() -> None:
    remembered: Remembered[int] = Remembered()
    listed = raws(*map(str, range(500)))
    remembered.keep(b"", listed[:490], 490)
    assert remembered.beginning(b"", listed) == (490, 490)


def test_the_least_recently_used_leave_first() -> None:
    remembered: Remembered[str] = Remembered(most_bytes=10)
    for name in ("aaaa", "bbbb"):
        remembered.keep(b"", raws(name), name)
    assert remembered.beginning(b"", raws("aaaa")) is not None
    remembered.keep(b"", raws("cccc"), "cccc")
    assert [remembered.beginning(b"", raws(name)) is not None for name in ("aaaa", "bbbb", "cccc")] == [
        True,
        False,
        True,
    ]
    remembered.keep(b"", raws("d" * 20), "too long")
    assert remembered.beginning(b"", raws("d" * 20)) is None
    assert remembered.beginning(b"", raws("aaaa")) is not None


@given(
    st.lists(st.lists(st.sampled_from(["1", "2", '"a"']), max_size=5), max_size=6), st.lists(st.sampled_from("12"))
)
def test_what_is_found_is_a_beginning(kept: list[list[str]], asked: list[str]) -> None:
    remembered: Remembered[list[str]] = Remembered()
    for texts in kept:
        remembered.keep(b"", raws(*texts), texts)
    found = remembered.beginning(b"", raws(*asked))
    longest = max((texts for texts in kept if texts == asked[: len(texts)]), key=len, default=None)
    assert (found is None) == (longest is None)
    if found is not None:
        assert found == (len(found[1]), longest)
