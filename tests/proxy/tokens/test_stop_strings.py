from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.stop_strings import StopTrimmer, partial_marker

TEXTS = st.text(alphabet="ab\n", max_size=20)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> str:
    """Return the text up to the stop string that is complete first; of those that end together, the one that begins
    first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(TEXTS, STOPS)
def test_token_by_token_cuts_at_the_first_stop(text: str, stops: list[str]) -> None:
    trimmer = StopTrimmer(stops)
    released = "".join(trimmer.feed(character) for character in text) + trimmer.finish()
    assert released == expected(text, stops)
    assert (trimmer.stopped_by is not None) == any(stop in text for stop in stops)
    assert text.startswith(released + (trimmer.stopped_by or ""))
    assert trimmer.stopped_by in {*stops, None}


@given(TEXTS, STOPS, st.lists(st.integers(0, 20), max_size=5))
def test_any_split_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    trimmer = StopTrimmer(stops)
    released = "".join(trimmer.feed(text[a:b]) for a, b in itertools.pairwise(edges)) + trimmer.finish()
    assert released == expected(text, stops)


def test_text_is_not_delayed_without_need() -> None:
    trimmer = StopTrimmer(["STOP"])
    assert [trimmer.feed(piece) for piece in ("abc", "ST", "AR", "S")] == ["abc", "", "STAR", ""]
    assert trimmer.finish() == "S"


@given(TEXTS, st.text(alphabet="ab\n", min_size=1, max_size=4))
def test_partial_marker_is_the_longest(text: str, marker: str) -> None:
    lengths = [length for length in range(len(marker)) if text.endswith(marker[:length])]
    assert partial_marker(text, marker) == max(lengths)
