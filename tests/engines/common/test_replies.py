"""Version spans in the answers of our own engines."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.common.replies import WeightSpans


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=12))
def test_spans_cover_all_tokens_in_order_and_join_equal_neighbours(parts: list[tuple[str, int]]) -> None:
    spans, labels = WeightSpans(), []
    for label, count in parts:
        labels += [label] * count
        spans.extend(label, len(labels))
    found = spans.to_wire()
    assert [each["version"] for each in found for _ in range(each["start"], each["end"])] == labels
    assert [each["version"] for each in found] == [label for label, _ in groupby(labels)]
