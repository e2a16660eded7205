from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.openings import Openings
from proxy.tokens.template import ChatTemplate

TEXT = st.text(alphabet="ab \n<|im_end|>é", max_size=8)
BRIEF, LONG = "be brief " * 20, "be long " * 20
END = 7
"""The id of `|` in the test's own encoding, where it ends a message."""


@given(system=TEXT, asked=st.lists(TEXT, min_size=4, max_size=4), name=st.sampled_from(["small", "shipped"]))
def test_a_known_opening_has_the_ids_of_the_whole(
    templates: dict[str, ChatTemplate], system: str, asked: list[str], name: str
) -> None:
    template = templates[name]
    for question in asked:
        messages = [{"role": "system", "content": f"{BRIEF}{system}"}, {"role": "user", "content": question}]
        text = template.render(messages, None, generation_prompt=True)
        assert template.encode_conversation(text) == template.encode(text)


class Counting:
    """An encoding by characters that notes what it encoded."""

    def __init__(self, *, end_swallows: bool = False) -> None:
        self.encoded: list[str] = []
        self._end_swallows = end_swallows
        self.openings = Openings(self.encode, self.encode_after, (END, "|"))

    def encode(self, text: str) -> tuple[int, ...]:
        self.encoded.append(text)
        if self._end_swallows:
            text = text.replace("| ", "|")
        return tuple(END if character == "|" else ord(character) for character in text)

    def encode_after(self, last: int, text: str) -> tuple[int, ...]:
        assert last == END
        return self.encode(text)


def test_an_opening_is_tokenised_again_until_its_second_use() -> None:
    one = Counting()
    for rest in ("one", "two"):
        one.openings.encode(f"{BRIEF}|{rest}")
    one.encoded.clear()
    assert one.openings.encode(f"{BRIEF}|three") == [*map(ord, BRIEF), END, *map(ord, "three")]
    assert one.encoded == ["three"]
    assert one.openings.encode(f"{LONG}|three")
    assert one.encoded == ["three", f"{LONG}|three"]


def test_forgotten_openings_are_tokenised_again() -> None:
    one = Counting()
    for rest in ("one", "two"):
        one.openings.encode(f"{BRIEF}|{rest}")
    one.openings.forget()
    one.encoded.clear()
    one.openings.encode(f"{BRIEF}|three")
    assert f"{BRIEF}|three" in one.encoded


def test_an_opening_whose_parts_differ_from_the_whole_is_not_used() -> None:
    one = Counting(end_swallows=True)
    for rest in (" one", " two", " three"):
        text = f"{BRIEF}|{rest}"
        assert one.openings.encode(text) == one.encode(text)


@pytest.mark.parametrize("text", ["", "no end", BRIEF, f"{BRIEF}\ud800|rest"])
def test_any_text_is_encoded(text: str) -> None:
    one = Counting()
    assert [one.openings.encode(text) for _ in range(3)] == [one.encode(text)] * 3
