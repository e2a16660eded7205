from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.reasoning import Reasoning, ReasoningParser, opens_reasoning
from tests.proxy.tokens.pieces import cut, told

MARKUP = st.text(alphabet="</think> \n", max_size=40)


def read(text: str, *, inside: bool = False) -> tuple[str, str]:
    """Return the thought and the answer."""
    events = told(ReasoningParser(in_reasoning=inside), [text])
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thought, "".join(event for event in events if isinstance(event, str))


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (" \n<think>hm</think>yes", "hm", "yes"),
        ("<think>\n  hm\n\nso </think>\n    code\n", "hm\n\nso", "    code\n"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think></think>", "", ""),
        ("<think>hm", "hm", ""),
        ("<think>hm </thi", "hm </thi", ""),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("yes <think>hm</think>", "", "yes <think>hm</think>"),
        ("hm</think>\n\nyes", "", "hm</think>\n\nyes"),
        ("  yes", "", "  yes"),
        ("<thi", "", "<thi"),
        ("", "", ""),
    ],
)
def test_a_thought_comes_first(text: str, thought: str, answer: str) -> None:
    assert read(text) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes"),
        ("\n\nhm</think>yes", "hm", "yes"),
        ("<think>\nhm</think>yes", "hm", "yes"),
        ("\n<think>hm</think>yes", "hm", "yes"),
        ("</think>yes", "", "yes"),
        ("hm", "hm", ""),
        ("<thi", "<thi", ""),
        (" \n", "", ""),
    ],
)
def test_a_thought_that_the_prompt_opened(text: str, thought: str, answer: str) -> None:
    assert read(text, inside=True) == (thought, answer)


@given(MARKUP | st.text(), st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_any_split_tells_the_same(text: str, cuts: list[int], inside: bool) -> None:
    whole = told(ReasoningParser(in_reasoning=inside), [text])
    assert told(ReasoningParser(in_reasoning=inside), cut(text, cuts)) == whole
    assert told(ReasoningParser(in_reasoning=inside), list(text)) == whole


@given(MARKUP | st.text(), st.booleans())
def test_only_tags_and_white_space_are_lost(text: str, inside: bool) -> None:
    kept = "".join("".join(read(text, inside=inside)).split())
    assert kept in {
        "".join(candidate.split())
        for opened in (text, text.replace("<think>", "", 1))
        for candidate in (opened, opened.replace("</think>", "", 1))
    }


@given(st.text(), st.text())
def test_a_rendered_thought_is_read_back(thought: str, answer: str) -> None:
    thought, answer = thought.strip(), answer.lstrip("\r\n")
    if "</think>" not in thought and not thought.startswith("<think>"):
        assert read(f"<think>\n{thought}\n</think>\n\n{answer}") == (thought, answer)
        assert read(f"{thought}\n</think>\n\n{answer}", inside=True) == (thought, answer)


def test_a_thought_streams() -> None:
    parser = ReasoningParser(in_reasoning=False)
    events = [
        parser.feed(piece) for piece in ("<th", "ink>", "\n", "let", " me", " \n", "see", "</", "think>", "\n", "so")
    ]
    words = [[Reasoning("let")], [Reasoning(" me")], [], [Reasoning(" \nsee")], [], [], [], ["so"]]
    assert events == [[], [], [], *words]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("…assistant<think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_prompts_that_open_a_thought(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt) is opens
