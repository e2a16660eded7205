"""Bodies of POST /v1/responses: their messages and tools, and a 400 for what is invalid or unsupported."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.calls.call import CallDelta, Choice, ModelCall, ToolUse
from proxy.calls.conversation import ConversationIndex, RememberedMessages
from proxy.calls.remembered import Remembered
from proxy.contract.identifiers import new_turn_id, part_id, turn_of_part
from proxy.contract.turn import FinishReason
from proxy.dialects.fields import decode_listing
from proxy.dialects.responses.item_reader import references
from proxy.dialects.responses.items import input_items, output_items
from proxy.dialects.responses.request import ItemMemory, ResponseBody, parse_response_request
from proxy.dialects.responses.tools import special_tools
from proxy.errors import InvalidRequest, NotFound, UnsupportedParameter
from proxy.tokens.formats import ToolCall

TURN = new_turn_id()
OTHER = new_turn_id()
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
ASKED = {"role": "user", "content": "x"}


def parse(**body: Any) -> ModelCall:
    return parse_with({}, input=body.pop("input", "x"), **body)


def parse_with(referenced: Any, memory: ItemMemory | None = None, known: Any = frozenset(), **body: Any) -> ModelCall:
    value = decode_listing(json.dumps({"model": "m", **body}).encode(), "input")
    return parse_response_request(value, referenced, known=known, memory=memory)


def messages(items: Any, **body: Any) -> list[dict[str, Any]]:
    return list(parse(input=items, **body).messages)


def offered(**body: Any) -> list[dict[str, Any]]:
    return list(parse(**body).tools or [])


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def called(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": "{}", "call_id": "c", **fields}


def result(call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


# What is asked


def test_input_is_text_or_items() -> None:
    assert messages("Hello") == messages([{"role": "user", "content": "Hello"}])
    assert messages([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]) == [
        {"role": "user", "content": "Hello"}
    ]


def test_instructions_come_first_as_a_system_message() -> None:
    assert messages("x", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, ASKED]
    assert messages("x", instructions="") == [ASKED]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
        {"type": "text", "text": "a"},
        {"type": "refusal", "refusal": "a"},
    ],
)
def test_content_may_be_parts_in_every_role(role: str, part: dict[str, Any]) -> None:
    assert messages([{"role": role, "content": [part, part]}]) == [{"role": role, "content": "aa"}]


def test_null_is_absent_for_every_optional_field() -> None:
    optional = [name for name in ResponseBody.model_fields if name not in ("model", "input")]
    assert parse(**dict.fromkeys(optional)).messages == parse().messages
    assert parse(**dict.fromkeys(optional)).warnings == ()


@pytest.mark.parametrize(
    ("body", "known", "arguments", "warnings"),
    [
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort"}, {"reasoning_effort": "low"}, ()),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking"}, {"enable_thinking": False}, ()),
        ({"reasoning": {"effort": "low"}}, set(), {}, ("the model's template does not read reasoning_effort",)),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking"}, {"enable_thinking": True}, ()),
        ({"reasoning": {"effort": None}}, set(), {}, ()),
    ],
)
def test_reasoning_effort_reaches_the_template(
    body: dict[str, Any], known: set[str], arguments: dict[str, Any], warnings: tuple[str, ...]
) -> None:
    call = parse_with({}, known=known, input="x", **body)
    assert (call.template_arguments, call.warnings) == (arguments, warnings)


def test_unknown_fields_are_ignored() -> None:
    assert parse(client_metadata={"x": "y"}, something=[1]).messages == [ASKED]


def test_the_request_is_stored_without_its_input() -> None:
    assert parse(metadata={"a": "b"}, tools=[FUNCTION]).body == {
        "model": "m",
        "metadata": {"a": "b"},
        "tools": [FUNCTION],
    }


def test_sampling() -> None:
    call = parse(max_output_tokens=32000, temperature=0.3, top_p=0.5, seed=7, top_k=3, stop="x", presence_penalty=1)
    assert (call.sampling.max_new_tokens, call.sampling.temperature, call.sampling.top_p) == (32000, 0.3, 0.5)
    assert (call.sampling.seed, call.sampling.top_k, call.sampling.stop) == (7, 3, ("x",))
    assert call.sampling.presence_penalty == 1


@pytest.mark.parametrize(
    ("body", "logprobs", "top"),
    [
        ({}, False, 0),
        ({"include": ["message.output_text.logprobs"]}, True, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, True, 3),
        ({"top_logprobs": 3}, True, 3),
        ({"top_logprobs": 0}, False, 0),
    ],
)
def test_logprobs(body: dict[str, Any], logprobs: bool, top: int) -> None:
    assert (parse(**body).logprobs, parse(**body).top_logprobs) == (logprobs, top)


# Answers that come back


def test_the_items_of_an_answer_are_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert messages([ASKED, thought, said("Let me see."), called(), result()]) == [
        ASKED,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_items_of_an_answer_become_that_answer_in_any_order(order: tuple[int, ...]) -> None:
    items = [
        {"type": "reasoning", "id": part_id("rs", TURN), "summary": []},
        said("a", id=part_id("msg", TURN)),
        called("one", id=part_id("fc", TURN, 0)),
        called("two", id=part_id("fc", TURN, 1)),
    ]
    read = messages([ASKED, *(items[index] for index in order), result()])
    assert [message["role"] for message in read] == ["user", "assistant", "tool"]
    assert read[1]["content"] == "a"
    assert {call["function"]["name"] for call in read[1]["tool_calls"]} == {"one", "two"}


def test_parallel_calls_of_an_answer_stay_together_though_each_is_followed_by_its_output() -> None:
    items = [
        called("one", id=part_id("fc", TURN, 0), call_id="1"),
        result("1"),
        called("two", id=part_id("fc", TURN, 1), call_id="2"),
        result("2"),
    ]
    read = messages([ASKED, *items])
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["name"] for call in read[1]["tool_calls"]] == ["one", "two"]


@pytest.mark.parametrize(
    "answers",
    [
        [said("a", id=part_id("msg", TURN)), said("b", id=part_id("msg", OTHER))],
        [said("a"), said("b")],
        [called(), said("b")],
        [said("a", id=part_id("msg", TURN)), called(id=part_id("fc", OTHER, 0))],
        [called(), {"type": "reasoning", "summary": []}],
    ],
)
def test_two_consecutive_answers_stay_two(answers: list[Any]) -> None:
    assert [message["role"] for message in messages([ASKED, *answers])] == ["user", "assistant", "assistant"]


def test_calls_after_an_output_belong_to_the_next_answer() -> None:
    read = messages([ASKED, called(), result(), called(), result()])
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "assistant", "tool"]


def test_encrypted_reasoning_is_accepted_but_not_read() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    assert messages([ASKED, thought, said("a")])[1] == {"role": "assistant", "content": "a"}


def test_outputs_are_text_or_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    read = messages([ASKED, called(), {**result(), "output": parts}])
    assert read[2] == {"role": "tool", "content": "ab", "tool_call_id": "c"}


def test_local_shell_calls_are_calls() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    items = [
        {"type": "local_shell_call", "id": "x", "call_id": "c", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
    ]
    call, output = messages([ASKED, *items])[1:]
    assert call["tool_calls"][0]["function"]["name"] == "local_shell"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == action
    assert output["content"] == "a.txt"


def test_hosted_and_unknown_items_are_ignored_with_a_warning() -> None:
    call = parse(input=[ASKED, {"type": "web_search_call", "id": "ws_1"}, {"type": "new;\nthing"}])
    assert call.messages == [ASKED]
    assert call.warnings == (
        "input[1] of type web_search_call is ignored",
        "input[2] of type new??thing is ignored",
    )


def test_an_item_can_refer_to_another() -> None:
    items = [ASKED, {"type": "item_reference", "id": "msg_1"}, {"id": "fc_1"}, result()]
    assert references([msgspec.Raw(json.dumps(item).encode()) for item in items]) == ["msg_1", "fc_1"]
    call = parse_with({"msg_1": said("a"), "fc_1": called()}, input=items)
    assert call.messages[1]["content"] == "a"
    assert call.messages[1]["tool_calls"]
    with pytest.raises(NotFound) as caught:
        parse_with({"msg_1": said("a")}, input=items)
    assert caught.value.param == "input[2].id"


@given(st.lists(st.sampled_from(["text", "thought", "call", "tool"]), max_size=12))
def test_items_of_a_conversation_stand_for_that_conversation(kinds: list[str]) -> None:
    """Conversion to items and back is the identity, without ids and consecutive answers."""
    conversation: list[dict[str, Any]] = [dict(ASKED)]
    for index, kind in enumerate(kinds):
        if kind == "tool":
            call = {"id": f"{index}", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            conversation.append({"role": "assistant", "content": None, "tool_calls": [call]})
            conversation.append({"role": "tool", "content": "r", "tool_call_id": f"{index}"})
        elif kind == "call":
            call = {"id": f"{index}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            conversation.append({"role": "assistant", "content": "t", "tool_calls": [call, call]})
        elif kind == "thought":
            conversation.append({"role": "assistant", "content": "t", "reasoning_content": "why"})
        else:
            conversation.append({"role": "system", "content": "t"})
        conversation.append(dict(ASKED))
    assert messages(input_items(TURN, conversation, {})) == conversation


# Conversations that come again


def test_only_the_new_items_of_a_known_conversation_are_read() -> None:
    memory: ItemMemory = Remembered()
    items: list[Any] = [ASKED, {"type": "web_search_call"}]
    for turn in range(4):
        call = parse_with({}, memory, input=items, instructions="Be brief.")
        again = parse_with({}, input=items, instructions="Be brief.")
        assert list(call.messages) == list(again.messages)
        assert call.warnings == again.warnings
        assert isinstance(call.messages, RememberedMessages)
        assert call.messages.start == (0 if turn == 0 else len(call.messages) - 2)
        index = ConversationIndex()
        assert index.read(call.messages).hash == index.read(list(call.messages)).hash
        items += [said(f"{turn}"), {"role": "user", "content": f"And {turn}?"}]


def test_the_same_items_after_other_instructions_are_read_again() -> None:
    memory: ItemMemory = Remembered()
    for instructions in ("a", "b", None, "a"):
        call = parse_with({}, memory, input=[ASKED], instructions=instructions)
        assert list(call.messages) == list(parse_with({}, input=[ASKED], instructions=instructions).messages)


def test_an_item_of_a_remembered_answer_is_read_with_that_answer() -> None:
    memory: ItemMemory = Remembered()
    first = [ASKED, called("one", id=part_id("fc", TURN, 0)), result()]
    more = [*first, called("two", id=part_id("fc", TURN, 1)), result()]
    for items in (first, more, first, more):
        assert list(parse_with({}, memory, input=items).messages) == messages(items)


def test_an_answer_at_the_end_is_not_cached_because_it_may_grow() -> None:
    memory: ItemMemory = Remembered()
    for items in ([ASKED, said("a")], [ASKED, said("a"), called()], [ASKED, said("a"), called(), result()]):
        assert list(parse_with({}, memory, input=items).messages) == messages(items)


@given(st.data())
def test_memory_does_not_change_the_result(data: st.DataObject) -> None:
    memory: ItemMemory = Remembered(most_bytes=data.draw(st.sampled_from([0, 300, 1 << 20])))
    pieces = [
        ASKED,
        said("a"),
        said("b", id=part_id("msg", TURN)),
        called(id=part_id("fc", TURN, 0)),
        called(),
        result(),
        {"type": "reasoning", "summary": []},
        {"type": "mcp_call"},
        {"type": "additional_tools", "tools": [FUNCTION]},
    ]
    items: list[Any] = [ASKED]
    for _ in range(6):
        call, again = parse_with({}, memory, input=items), parse_with({}, input=items)
        assert list(call.messages) == list(again.messages)
        assert (call.tools, call.warnings) == (again.tools, again.warnings)
        items += data.draw(st.lists(st.sampled_from(pieces), max_size=3))


def test_an_error_after_remembered_items_names_its_place() -> None:
    memory: ItemMemory = Remembered()
    parse_with({}, memory, input=[ASKED, ASKED])
    with pytest.raises(InvalidRequest) as caught:
        parse_with({}, memory, input=[ASKED, ASKED, {"role": "king", "content": "x"}])
    assert caught.value.param == "input[2].role"


# Tools


def test_function_tools_are_offered_in_the_shape_of_chat_completions() -> None:
    tool = {**FUNCTION, "strict": True, "description": "Looks.", "defer_loading": None}
    assert parse(tools=[tool]).tools == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object"},
                "strict": True,
            },
        }
    ]
    assert parse(tools=[FUNCTION]).tools == [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    ]


def test_a_custom_tool_is_offered_as_a_function_of_text() -> None:
    (tool,) = offered(tools=[PATCH])
    assert tool["function"]["name"] == "patch"
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["parameters"]["properties"]["input"]["type"] == "string"


def test_the_grammar_of_a_custom_tool_is_described_to_the_model() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    (tool,) = offered(tools=[{**PATCH, "format": form}])
    assert tool["function"]["description"].startswith("Edits files.\n\n")
    assert 'start: "a"' in tool["function"]["description"]
    warnings = parse(tools=[{**PATCH, "format": form}]).warnings
    assert warnings == ("the grammar of tools[0] is described to the model but not enforced",)


def test_tools_of_a_namespace_have_both_names() -> None:
    tools = [{"type": "namespace", "name": "agents", "description": "x", "tools": [FUNCTION, PATCH, {"type": "mcp"}]}]
    call = parse(tools=tools)
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["agents__look", "agents__patch"]
    assert call.warnings == ("tools[0].tools[2] of type mcp is ignored",)
    (echo,) = messages([called("look", namespace="agents")], tools=tools)
    assert echo["tool_calls"][0]["function"]["name"] == "agents__look"


def test_other_tools_are_ignored_with_a_warning() -> None:
    call = parse(tools=[{"type": "web_search"}, {"type": "local_shell"}, FUNCTION])
    assert len(call.tools or ()) == 1
    assert call.warnings == ("tools[0] of type web_search is ignored", "tools[1] of type local_shell is ignored")


def test_an_item_can_add_tools() -> None:
    call = parse(input=[ASKED, {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}])
    assert call.messages == [ASKED]
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["look"]
    assert call.warnings == ()


@pytest.mark.parametrize(
    ("choice", "use", "name", "offered"),
    [
        (None, "auto", None, 2),
        ("auto", "auto", None, 2),
        ("none", "none", None, 0),
        ("required", "required", None, 2),
        ({"type": "function", "name": "look"}, "required", "look", 2),
        ({"type": "custom", "name": "patch"}, "required", "patch", 2),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}, "auto", None, 1),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            "required",
            None,
            1,
        ),
    ],
)
def test_tool_choice(choice: Any, use: str, name: str | None, offered: int) -> None:
    call = parse(tools=[FUNCTION, PATCH], tool_choice=choice)
    assert (call.tool_choice.use, call.tool_choice.name) == (ToolUse(use), name)
    assert len(call.tools or ()) == offered


def answer_of(arguments: str, name: str = "patch") -> list[dict[str, Any]]:
    made = CallDelta("call_1", ToolCall(index=0, name=name, arguments=arguments))
    choice = Choice(
        turn_id=TURN, text="", finish_reason=FinishReason.TOOL_CALLS, completion_tokens=1, tool_calls=(made,)
    )
    return output_items(TURN, choice, special_tools([PATCH]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n"}', "*** Begin\n"),
        ('{"input":"{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "x", "more": 1}', '{"input": "x", "more": 1}'),
        ("{}", "{}"),
    ],
)
def test_a_call_of_a_custom_tool_is_returned_unchanged(arguments: str, text: str) -> None:
    """The echo of a call is read as the same call, whatever arguments the model wrote."""
    (item,) = answer_of(arguments)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    (echo,) = messages([item])
    assert json.loads(echo["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)


def test_ids_contain_the_turn() -> None:
    (item,) = answer_of("{}")
    assert turn_of_part(item["id"]) == TURN
    assert turn_of_part("msg_01a1ff7f-87f4-7350-8484-389d038384a4") is None
    assert turn_of_part(None) is None


# Forms


def test_the_form_of_the_text() -> None:
    form = {"type": "json_schema", "name": "w", "schema": {"type": "object"}, "strict": True}
    asked = parse(text={"format": form, "verbosity": None}).answer_format
    assert asked is not None
    assert (asked.schema, asked.name, asked.strict) == ({"type": "object"}, "w", True)
    plain = parse(text={"format": {"type": "json_object"}}).answer_format
    assert plain is not None
    assert plain.schema is None
    assert parse(text={"format": {"type": "text"}}).answer_format is None


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ({"reasoning": {"effort": None, "summary": "auto"}}, "reasoning.summary has no effect"),
        ({"text": {"verbosity": "low"}}, "text.verbosity has no effect"),
        ({"truncation": "auto"}, "truncation auto has no effect: a prompt that is too long is refused"),
        ({"service_tier": "flex"}, "service_tier has no effect"),
        ({"include": ["reasoning.encrypted_content"]}, "include reasoning.encrypted_content has no effect"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation has no effect"),
    ],
)
def test_ignored_fields_cause_a_warning(body: dict[str, Any], warning: str) -> None:
    assert parse(**body).warnings == (warning,)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 3}]}, "input[0].type"),
        ({"input": [{"role": 3, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [called(call_id=3)]}, "input[0].call_id"),
        ({"input": [called(namespace=3)]}, "input[0].namespace"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].output"),
        ({"input": [{**result(), "output": 3}]}, "input[0].output"),
        ({"input": [{**result(), "call_id": 3}]}, "input[0].call_id"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].action"),
        ({"input": [{"type": "additional_tools"}]}, "input[0].tools"),
        ({"instructions": 3}, "instructions"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"tools": "x"}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{**FUNCTION, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{**FUNCTION, "strict": "x"}]}, "tools[0].strict"),
        ({"tools": [{**FUNCTION, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "namespace"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}, "text.format.strict"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"metadata": "x"}, "metadata"),
        ({"stop": [""]}, "stop[0]"),
        ({"store": "yes"}, "store"),
    ],
)
def test_an_error_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{**result(), "output": [{"type": "input_image"}]}]}, "input[0].output[0].type"),
    ],
)
def test_unsupported_fields_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**body)
    assert caught.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "item_reference"]
        )
        | JSON,
        "role": st.sampled_from(["user", "assistant"]) | JSON,
        "content": st.text(max_size=3)
        | st.lists(st.fixed_dictionaries({"type": JSON, "text": JSON}), max_size=2)
        | JSON,
        "id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
        "call_id": JSON,
        "input": JSON,
    },
)


@given(
    st.fixed_dictionaries(
        {"model": st.just("m"), "input": st.lists(ITEMS | JSON, max_size=4) | JSON},
        optional={name: JSON for name in ResponseBody.model_fields if name not in ("model", "input")},
    )
)
def test_any_json_is_converted_or_refused_with_its_place(value: dict[str, Any]) -> None:
    fault: str | None = "none"
    try:
        special_tools(parse_with({}, **value).body["tools"])
    except (InvalidRequest, NotFound) as error:
        fault = error.param
    assert fault
