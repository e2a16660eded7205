from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.embedded.stopping import StopStrings

PIECES = [bytes([byte]) for byte in "abcé€".encode()] + [b"ab", b"bca", "€a".encode(), b" b"]


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


@given(
    st.lists(st.text(alphabet="abcé€ ", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
)
def test_the_first_token_that_completes_a_stop_is_found(stops: list[str], ids: list[int]) -> None:
    """The result equals a search of the whole text after every token."""
    watcher = StopStrings(stops, decode)
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        expected = next((stop for stop in stops if stop in text), None)
        assert watcher.matched(ids[:end]) == expected
        if expected is not None:
            return


def test_only_the_tail_is_decoded() -> None:
    lengths = []

    def counting(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    StopStrings(["abc"], counting).matched([0] * 1000)
    assert lengths == [4]
