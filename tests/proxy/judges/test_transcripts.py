from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from proxy.judges.transcripts import mark_of, transcript_of

messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text(max_size=3000)}
    ),
    min_size=1,
    max_size=40,
)


@given(messages)
def test_every_message_is_one_line_and_the_mark_is_not_in_the_text(given_messages: list[dict[str, str]]) -> None:
    found = transcript_of(given_messages, task=None, max_characters=1 << 30)
    assert [json.loads(line) for line in found.text.split("\n")] == given_messages
    assert mark_of([found.text]) not in found.text
    assert not found.is_cut


@given(messages, st.integers(1000, 5000))
def test_a_long_conversation_stays_within_the_bound(given_messages: list[dict[str, str]], bound: int) -> None:
    whole = transcript_of(given_messages, task=None, max_characters=1 << 30)
    found = transcript_of(given_messages, task=None, max_characters=bound)
    assert len(found.text) <= bound
    assert found.is_cut == (len(whole.text) > bound)
    assert found.digest == whole.digest
    assert ("left out here" in found.text) or not found.is_cut or "left out here" in whole.text
