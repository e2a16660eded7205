from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.tokens.formats import TOOL_FORMATS, ToolCall
from proxy.tokens.output import Event, OutputFormat, output_format
from proxy.tokens.reasoning import Reasoning
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.families import FAMILIES, load
from tests.proxy.tokens.pieces import cut, text_and_calls, told

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
ARGUMENTS = st.dictionaries(st.text(alphabet="abcé_ -$.", min_size=1, max_size=8), JSON, max_size=4)
NAMES = st.text(alphabet="abcXYZ019_-.", min_size=1, max_size=12)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
ENDS = ("</tool_call>", "</parameter>", "</function>", "<think>", "</think>")
USER = {"role": "user", "content": "x"}


class Written:
    """A template that has only a text."""

    def __init__(self, text: str) -> None:
        self.sources = (text,)
        self.single_calls = False


def schema(value: Any) -> dict[str, Any]:
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return {"type": kinds.get(type(value), "object")}


def tools_of(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the tools that these calls use."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {key: schema(value) for key, value in given.items()}},
            },
        }
        for name, given in calls
    ]


def message(calls: list[tuple[str, dict[str, Any]]], text: str = "", thought: str = "") -> dict[str, Any]:
    made = [
        {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": given}}
        for index, (name, given) in enumerate(calls)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    return {**answer, **({"tool_calls": made} if made else {}), **({"reasoning_content": thought} if thought else {})}


def output_of(template: ChatTemplate, answer: dict[str, Any]) -> str:
    """Return the output of a model with this answer, without the part that its prompt already contains."""
    prompt = template.render([USER], None, generation_prompt=True)
    rendered = template.plain(template.render([USER, answer], None, generation_prompt=False))
    written = rendered.removesuffix(template.closing)
    if written.startswith(prompt):
        return written.removeprefix(prompt)
    return "\n</think>\n\n" + written.removeprefix(prompt.removesuffix("<think>\n"))


def read(name: str, text: str, tools: list[dict[str, Any]], cuts: list[int]) -> list[Event]:
    form = output_format(load(name))
    inside = form.opens_reasoning(load(name).render([USER], None, generation_prompt=True))
    return told(form.start(calls_allowed=True, in_reasoning=inside, tools=tools), cut(text, cuts))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_detected_in_the_template(name: str) -> None:
    family, form = FAMILIES[name], output_format(load(name))
    assert form.tool_format is not None
    assert form.tool_format.name == family.tool_format
    assert form.reasoning is family.reasoning


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages }}",
        "<tool_call>{{ name }}\n<arg_key>",
        "<minimax:tool_call>",
        "<|tool_call_begin|>",
        "<tool_calls>",
    ],
)
def test_unknown_names_are_not_looked_up(text: str) -> None:
    assert output_format(Written(text)) == OutputFormat()


def test_the_run_overrides_the_detection() -> None:
    template = load("hermes")
    form = output_format(template, tool_parser="mistral", reasoning_parser="think")
    assert form == OutputFormat(tool_format=TOOL_FORMATS["mistral"], reasoning=True)
    assert output_format(load("qwen3"), tool_parser="none", reasoning_parser="none") == OutputFormat()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rendered_call_contains_the_kept_texts_and_one_end_marker(name: str) -> None:
    form = output_format(load(name))
    text = output_of(load(name), message([("f", {"a": 1})]))
    assert form.kept_texts
    if form.call_end is not None:
        assert text.endswith(form.call_end)
        assert text.count(form.call_end) == 1


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(data=st.data())
def test_rendered_calls_are_read_back(name: str, data: st.DataObject) -> None:
    calls = data.draw(CALLS)
    written_values = json.dumps(calls, ensure_ascii=False)
    if any(end in written_values for end in ENDS):
        return
    tools = tools_of(calls[-1:])
    if FAMILIES[name].tool_format == "qwen3_coder":
        calls = [calls[-1]] * len(calls)
    if load(name).single_calls:
        calls = calls[:1]
    text = output_of(load(name), message(calls))
    events = read(name, text, tools, data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    assert all(isinstance(event, ToolCall) for event in events)
    found = [
        (event.index, event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCall)
    ]
    assert found == [(index, *call) for index, call in enumerate(calls)]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.reasoning and name != "r1"])
@settings(max_examples=40)
@given(thought=st.text(), said=st.text(alphabet="ab é\n{}"), calls=st.lists(st.just(("f", {"a": "b"})), max_size=2))
def test_a_rendered_thought_comes_before_text_and_calls(
    name: str, thought: str, said: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    thought, said = thought.strip(), said.strip()
    if not thought or "think>" in thought:
        return
    events = read(name, output_of(load(name), message(calls, said, thought)), tools_of(calls), [])
    assert events[0] == Reasoning(thought)
    text, found = text_and_calls(events[1:])
    assert (text, len(found)) == (said, len(calls))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "r1", "qwen3_5"])
def test_calls_inside_a_thought_are_thought(name: str) -> None:
    call = output_of(load(name), message([("f", {})])).split("</think>\n\n")[-1]
    events = read(name, f"<think>maybe {call}</think>{call}", [], [])
    assert events[0] == Reasoning(f"maybe {call}")
    assert [type(event) for event in events] == [Reasoning, ToolCall]


@pytest.mark.parametrize(("name", "opens"), [("qwen3", False), ("qwen3_thinking", True), ("hermes", False)])
def test_templates_that_open_the_thought(name: str, opens: bool) -> None:
    template = load(name)
    rendered = template.render([USER], None, generation_prompt=True)
    form = output_format(template, reasoning_parser="think")
    assert form.opens_reasoning(rendered) is opens
    assert form.opens_reasoning(template.tail_text(template.encode("x" * 100 + rendered))) is opens
    assert not output_format(template, reasoning_parser="none").opens_reasoning(rendered)


@pytest.mark.parametrize(
    ("tail", "prefill", "inside"),
    [
        ("<think>\n", "", True),
        ("<think>\n", "Let me", True),
        ("<think>\n", "hm</think>\n\nIt", False),
        ("assistant\n", "<think>Let me", True),
        ("assistant\n", "<think>hm</think>It", False),
        ("assistant\n", "It is", False),
    ],
)
def test_whether_a_prefilled_answer_begins_inside_a_thought(tail: str, prefill: str, inside: bool) -> None:
    assert OutputFormat(reasoning=True).begins_inside_thought(tail, prefill) is inside
    assert not OutputFormat().begins_inside_thought(tail, prefill)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_any_form_can_be_rendered(name: str) -> None:
    """Mistral's templates accept only nine letters and digits."""
    template = load(name)
    texts = set()
    for call_id in ("call_0123456789abcdef01234567", "x", "", "é" * 9, "toolu_01", "abc123XYZ"):
        answer = message([("f", {})])
        answer["tool_calls"][0]["id"] = call_id
        result = {"role": "tool", "tool_call_id": call_id, "content": "2"}
        once, again = (template.render([USER, answer, result], None, generation_prompt=True) for _ in range(2))
        assert once == again
        texts.add(once)
    shows_ids = name in ("mistral_list", "mistral_ids", "mistral_named")
    assert len(texts) == (6 if shows_ids else 1)
    assert ("abc123XYZ" in "".join(texts)) is shows_ids


def test_a_template_for_single_calls_is_known() -> None:
    assert not load("llama3").single_calls
    assert load("llama3_single").single_calls
    with pytest.raises(InvalidRequest, match="single"):
        load("llama3_single").render([USER, message([("f", {})] * 2)], None, generation_prompt=True)


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": "\\uD83D x"}', '{"\\udfff": 1}', '{"a": "\\ud83d\\ude00"}']
)
def test_arguments_with_lone_surrogates_can_be_encoded(arguments: str) -> None:
    answer = message([("f", {})])
    answer["tool_calls"][0]["function"]["arguments"] = arguments
    assert load("hermes").encode(load("hermes").render([USER, answer], None, generation_prompt=True))
