from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.transcript import draw, pretty_json
from proxy.contract.turn import VersionSpan
from proxy.overview.sessions.views import TurnTokens, TurnView

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]), JSON
)


@given(st.lists(MESSAGES, max_size=3), MESSAGES)
def test_any_text_of_a_client_can_be_printed(messages: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    (turn,) = draw([_turn("turn_1", None, messages, answer)], [])
    assert len(turn.messages) == len(messages) + 1


def test_a_result_carries_the_name_of_the_tool_that_an_earlier_turn_called() -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    first = _turn("turn_1", None, [{"role": "user", "content": "1+2?"}], {"role": "assistant", "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": "call_7", "content": '{"sum": 3}'}
    second = _turn("turn_2", "turn_1", [result], {"role": "assistant", "content": "3"})
    drawn = draw([first, second], [])
    (made,) = drawn[0].messages[1].calls
    assert (made.name, made.arguments, made.is_json) == ("add", '{"a": 1, "b": 2}', True)
    assert (drawn[1].messages[0].title, drawn[1].messages[0].is_json) == ("add", True)
    assert [turn.branch for turn in drawn] == [None, None]


def test_broken_arguments_are_shown_as_they_are() -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1,'}}
    (turn,) = draw([_turn("turn_1", None, [], {"role": "assistant", "tool_calls": [call]})], [])
    assert (turn.messages[0].calls[0].arguments, turn.messages[0].calls[0].is_json) == ('{"a": 1,', False)


def test_a_branch_names_where_it_begins() -> None:
    turns = [
        _turn("a", None, [], None),
        _turn("b", "a", [], None),
        _turn("c", "a", [], None),
        _turn("d", None, [], None),
    ]
    assert [turn.branch for turn in draw(turns, [])] == [
        None,
        None,
        "branches off after turn 1",
        "a conversation of its own",
    ]


def test_a_branch_within_a_turn_is_distinguished_from_a_continuation() -> None:
    first = msgspec.structs.replace(_turn("a", None, [], None), prompt_tokens=30, output_tokens=10)
    title = msgspec.structs.replace(_turn("b", "a", [], None), continuation="edited", prefix_tokens=3)
    after_all = msgspec.structs.replace(title, prefix_tokens=40)
    rewritten = msgspec.structs.replace(title, continuation="retemplated")
    told = [draw([first, turn], [])[1].branch for turn in (title, after_all, rewritten)]
    assert told == ["branches off within turn 1", None, None]


def test_the_choices_that_the_agent_left_behind_are_named() -> None:
    question = [{"role": "user", "content": "2+2?"}]
    choices = [
        msgspec.structs.replace(_turn(name, None, question, None), prompt_tokens=5, output_tokens=2, ordinal=number)
        for number, name in enumerate("abc")
    ]
    later = msgspec.structs.replace(_turn("d", "b", [], None), prefix_tokens=7, prompt_tokens=9)
    assert [turn.superseded for turn in draw([*choices, later], [])] == [True, False, True, False]
    assert not any(turn.superseded for turn in draw(choices, []))


def test_tokens_say_where_another_version_took_over() -> None:
    tokens = TurnTokens(prompt_ids=(), output_ids=(1, 2, 3), output_logprobs=(0.0, -1.0, -9.0), output_texts=None)
    spans = (VersionSpan(version=4, start=0, end=2), VersionSpan(version=5, start=2, end=3))
    (turn,) = draw([_turn("a", None, [], None, tokens=tokens, spans=spans)], [])
    assert [(token.text, token.heat, token.starts_version) for token in turn.tokens] == [
        ("1", 0, None), ("2", 2, None), ("3", 8, 5),
    ]  # fmt: skip


def test_content_parts_are_joined_and_long_json_is_indented() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": picture}]
    (turn,) = draw([_turn("a", None, messages, None)], [])
    assert (turn.messages[0].text, turn.messages[0].is_json) == ("one\ntwo", False)
    assert turn.messages[1].is_json
    assert "\n" in str(pretty_json('{"key": "' + "x" * 80 + '"}'))
    assert pretty_json("3") is None


def _turn(
    turn_id: str,
    parent_id: str | None,
    messages: list[dict[str, Any]],
    answer: dict[str, Any] | None,
    *,
    tokens: TurnTokens | None = None,
    spans: tuple[VersionSpan, ...] = (),
) -> TurnView:
    return TurnView(
        id=turn_id,
        session_id="ses",
        run_id="run",
        ordinal=0,
        parent_id=parent_id,
        state="complete",
        attributed_by="key",
        continuation="new",
        finish_reason="stop",
        prompt_tokens=0,
        prefix_tokens=0,
        output_tokens=0,
        spans=spans,
        sampling={},
        mean_logprob=None,
        started_at=0.0,
        first_token_at=None,
        finished_at=0.0,
        messages=tuple(messages),
        answer=answer,
        request={},
        tokens=tokens,
    )
