from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.messages import Message
from proxy.tokens.prefix import behind
from proxy.tokens.shortcut import Rendering, Shortcuts
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import CHATML, write_model

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TEXT = st.text(alphabet="ab \n<|im_end|>é", max_size=8)
CALLS = st.lists(st.sampled_from(["look", "listen"]), max_size=2)

NUMBERED = CHATML.replace("{{- message.content }}", "{{- loop.index ~ message.content }}")
"""Writes the number of every answer."""
LOOKS_BACK = CHATML.replace("message.content + '<|im_end|>", "message.content + messages[0].content + '<|im_end|>")
"""Repeats the first message after every other."""
LATER = CHATML.replace(
    "{{- '<|im_start|>' + message.role", "{{- 'long ' if loop.index > 30 }}{{- '<|im_start|>' + message.role"
)
"""Writes late messages differently."""


def answer(text: str, calls: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": str(n), "type": "function", "function": {"name": name, "arguments": "{}"}}
            for n, name in enumerate(calls)
        ]
    return message


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """A conversation that continues after an answer, and the number of its messages up to that answer."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(TEXT)})
    for _ in range(draw(st.integers(0, 4))):
        messages += [answer(draw(TEXT), draw(CALLS)), draw(following())]
    return [*messages, answer(draw(TEXT), draw(CALLS)), *draw(st.lists(following(), min_size=1, max_size=3))], len(
        messages
    ) + 1


def following() -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), TEXT)


@given(asked=conversations(), name=st.sampled_from(["small", "shipped"]), tools=st.booleans())
def test_the_short_way_and_the_whole_one_lead_to_the_same_text(
    templates: dict[str, ChatTemplate], asked: tuple[list[dict[str, Any]], int], name: str, tools: bool
) -> None:
    template, rendering = templates[name], Rendering(tools=TOOLS if tools else None)
    short = Shortcuts(template, behind).behind(asked[0], rendering, asked[1])
    assert short is not None
    assert short == behind(template, asked[0], rendering, asked[1])


def talk(turns: int) -> tuple[list[dict[str, Any]], int]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
    for number in range(turns):
        messages += [answer(f"said {number}", []), {"role": "user", "content": f"asked {number}"}]
    return messages, len(messages) - 1


def template_of(directory: Path, text: str) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(directory, template=text)))


def test_a_template_that_numbers_answers_changes_nothing_behind_them(tmp_path: Path) -> None:
    template = template_of(tmp_path, NUMBERED)
    messages, covered = talk(3)
    short = Shortcuts(template, behind).behind(messages, Rendering(), covered)
    assert short is not None
    assert short == behind(template, messages, Rendering(), covered)


def test_a_template_that_looks_back_is_rendered_whole(tmp_path: Path) -> None:
    template = template_of(tmp_path, LOOKS_BACK)
    messages, covered = talk(3)
    assert behind(template, messages, Rendering(), covered) is not None
    assert Shortcuts(template, behind).behind(messages, Rendering(), covered) is None


def test_a_template_that_writes_late_messages_differently_is_found_out_in_use(tmp_path: Path) -> None:
    template, rendering = template_of(tmp_path, LATER), Rendering()
    for opening in ([], [{"role": "system", "content": "x"}]):
        shortcuts = Shortcuts(template, behind)
        ways = []
        for turns in range(1, 40):
            messages, covered = talk(turns)
            ways.append(shortcuts.behind([*opening, *messages], rendering, len(opening) + covered))
        assert ways[3] == behind(template, [*opening, *talk(4)[0]], rendering, len(opening) + talk(4)[1])
        assert all(way is None for way in ways[16:])


def test_another_use_of_tools_is_tried_anew(tmp_path: Path) -> None:
    only_with_tools = CHATML.replace(
        "message.role == 'user'", "message.role == 'user' and not (tools and loop.index > 3)"
    )
    shortcuts = Shortcuts(template_of(tmp_path, only_with_tools), behind)
    messages, covered = talk(5)
    assert shortcuts.behind(messages, Rendering(), covered) is not None
    assert shortcuts.behind(messages, Rendering(tools=TOOLS), covered) is None


def test_a_template_that_rejects_the_stand_in_is_rendered_whole(tmp_path: Path) -> None:
    strict = "{%- if messages[0].content == '…' %}{{ raise_exception('who are you?') }}{% endif %}" + CHATML
    messages, covered = talk(2)
    assert Shortcuts(template_of(tmp_path, strict), behind).behind(messages, Rendering(), covered) is None


def test_the_first_short_conversations_are_compared_and_later_only_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing is compared, an answer of text only costs one rendering."""
    template = template_of(tmp_path, CHATML)
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Sequence[Message], tools: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, tools, **options)

    shortcuts = Shortcuts(template, behind)
    messages, covered = talk(2)
    shortcuts.behind(messages, Rendering(), covered)
    monkeypatch.setattr(ChatTemplate, "render", counted)
    costs = []
    for _ in range(34):
        rendered.clear()
        shortcuts.behind(messages, Rendering(), covered)
        costs.append(len(rendered))
    assert costs == [3] * 15 + [1] * 15 + [3] + [1] * 3
