"""Prefixes of lists, recognised by their bytes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.calls.remembered import Remembered


def raws(*texts: str) -> list[msgspec.Raw]:
    return [msgspec.Raw(text.encode()) for text in texts]


def keep(remembered: Remembered[str], *texts: str, seed: bytes = b"") -> None:
    whole = remembered.beginning(seed, raws(*texts))
    remembered.put(whole.key, "/".join(texts), size=whole.size)


def known(remembered: Remembered[str], *texts: str, seed: bytes = b"") -> tuple[int, str | None]:
    found = remembered.beginning(seed, raws(*texts))
    return found.count, found.state


def test_the_longest_known_beginning_is_found() -> None:
    remembered: Remembered[str] = Remembered()
    keep(remembered, "1")
    keep(remembered, "1", "2", "3")
    assert known(remembered, "1", "2") == (1, "1")
    assert known(remembered, "1", "2", "3") == (3, "1/2/3")
    assert known(remembered, "1", "2", "3", "4") == (3, "1/2/3")
    assert known(remembered, "2", "1") == (0, None)
    assert known(remembered, "1", seed=b"x") == (0, None)


def test_a_seed_cannot_be_taken_for_elements() -> None:
    remembered: Remembered[str] = Remembered()
    keep(remembered, seed=b"a,1")
    keep(remembered, "1", seed=b"a")
    assert known(remembered, "1", seed=b"a") == (1, "1")
    assert known(remembered, seed=b"a,1") == (0, "")


def test_long_lists_are_looked_at_near_their_end() -> None:
    remembered: Remembered[str] = Remembered()
    listed = [str(number) for number in range(500)]
    keep(remembered, *listed[:490])
    assert known(remembered, *listed)[0] == 490
    assert known(remembered, *listed, *listed)[0] == 0


def test_the_least_recently_used_leave_first() -> None:
    remembered: Remembered[str] = Remembered(most_bytes=80)
    for name in ("aaaa", "bbbb"):
        keep(remembered, name)
    assert known(remembered, "aaaa")[0] == 1
    keep(remembered, "cccc")
    assert [known(remembered, name)[0] for name in ("aaaa", "bbbb", "cccc")] == [1, 0, 1]
    keep(remembered, "d" * 60)
    assert known(remembered, "d" * 60)[0] == 0
    assert known(remembered, "aaaa")[0] == 1


LISTS = st.lists(st.sampled_from(["1", "2", '"a"']), max_size=5)


@given(st.lists(LISTS, max_size=6), LISTS)
def test_the_longest_known_prefix_is_found(kept: list[list[str]], asked: list[str]) -> None:
    remembered: Remembered[str] = Remembered()
    for texts in kept:
        keep(remembered, *texts)
    longest = max((texts for texts in kept if texts == asked[: len(texts)]), key=len, default=None)
    expected = (0, None) if longest is None else (len(longest), "/".join(longest))
    assert known(remembered, *asked) == expected
