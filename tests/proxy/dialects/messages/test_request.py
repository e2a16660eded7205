"""Bodies of POST /v1/messages: which fields are honoured, ignored or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.calls.call import AnswerFormat, ModelCall, ToolChoice, ToolUse
from proxy.dialects.messages.request import parse_count_tokens, parse_messages
from proxy.errors import InvalidRequest, UnsupportedParameter
from tests.proxy.calls.world import World
from tests.proxy.dialects.messages.anthropic_client import ASKED, TOOL, ask

SCHEMA: Any = {"type": "object", "properties": {"total": {"type": "integer"}}}


def parsed(known: set[str] | None = None, **body: Any) -> ModelCall:
    return parse_messages(json.dumps({**ASKED, **body}).encode(), known or set())


async def test_explicit_null_is_absent_for_every_optional_field(world: World) -> None:
    names = [
        "system", "tools", "tool_choice", "stop_sequences", "temperature", "top_p", "top_k", "metadata", "thinking",
        "stream", "service_tier", "context_management", "container", "mcp_servers", "output_format", "output_config",
        "cache_control", "inference_geo", "speed", "diagnostics",
    ]  # fmt: skip
    nothing: Any = dict.fromkeys(names)
    response = await ask(world, **nothing)
    assert response.status_code == 200
    assert "x-base-rl-warning" not in response.headers
    nulls: Any = {"output_config": {"format": None, "effort": None}, "metadata": {"user_id": None}}
    assert (await ask(world, **nulls)).status_code == 200


async def test_unknown_fields_are_ignored_with_a_warning(world: World) -> None:
    block = {"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}, "citations": None, "x_vendor": 1}
    body: Any = {"messages": [{"role": "user", "content": [block], "id": "x"}], "x_vendor": {"deep": [1]}}
    response = await ask(world, **body, service_tier="auto", speed="fast", inference_geo="eu")
    assert response.status_code == 200
    assert response.headers["x-base-rl-warning"] == "; ".join(
        f"{name} has no effect: there is no such field" for name in ("inference_geo", "speed", "x_vendor")
    )


def test_tools_are_functions_in_the_order_that_templates_write() -> None:
    tool = {"input_schema": SCHEMA, "description": "Adds.", "name": "add", "type": "custom", "strict": True,
            "cache_control": {"type": "ephemeral"}, "defer_loading": True}  # fmt: skip
    call = parsed(tools=[tool, {"name": "f", "input_schema": {}, "description": None}])
    assert json.dumps(call.tools) == json.dumps(
        [
            {
                "type": "function",
                "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True},
            },
            {"type": "function", "function": {"name": "f", "parameters": {}}},
        ]
    )
    assert call.warnings == ()


async def test_tools_that_anthropic_defines_are_ignored_with_a_warning(world: World) -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    response = await ask(world, tools=[*tools, TOOL])
    assert response.headers["x-base-rl-warning"] == (
        "tools[0] of type web_search_20250305 is ignored; tools[1] of type bash_20250124 is ignored; "
        "tools[2] of type text_editor_20250728 is ignored"
    )
    prompt = world.template.tokenizer.decode(list(world.engine.requests[0].input_ids))
    assert "calculator" in prompt
    assert "web_search" not in prompt


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "none"}, ToolChoice(use=ToolUse.NONE), True),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice(use=ToolUse.REQUIRED), True),
        ({"type": "tool", "name": "calculator"}, ToolChoice(use=ToolUse.REQUIRED, name="calculator"), True),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    call = parsed(tools=[TOOL], tool_choice=choice)
    assert (call.tool_choice, call.parallel_calls) == (expected, parallel)
    assert bool(call.tools) == (expected.use is not ToolUse.NONE)


@pytest.mark.parametrize("where", ["output_format", "output_config.format"])
def test_an_output_format_is_strict(where: str) -> None:
    asked = {"type": "json_schema", "schema": SCHEMA}
    body = {where: asked} if where == "output_format" else {"output_config": {"format": asked}}
    assert parsed(**body).answer_format == AnswerFormat(where=where, schema=SCHEMA, strict=True)


@pytest.mark.parametrize(("kind", "switch"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_becomes_the_templates_switch_if_it_has_one(kind: str, switch: bool) -> None:
    call = parsed({"enable_thinking"}, thinking={"type": kind})
    assert (call.template_arguments, call.warnings) == ({"enable_thinking": switch}, ())
    without = parsed(thinking={"type": kind})
    assert without.template_arguments == {}
    assert without.warnings == (
        f"thinking of type {kind} has no effect: the model's template does not read enable_thinking",
    )


def test_a_thinking_budget_is_not_enforced_and_causes_a_warning() -> None:
    (warning,) = parsed({"enable_thinking"}, thinking={"type": "enabled", "budget_tokens": 1024}).warnings
    assert "budget_tokens is not enforced" in warning


@pytest.mark.parametrize(("effort", "level"), [("low", "low"), ("max", "high")])
def test_effort_becomes_the_templates_argument_if_it_has_one(effort: str, level: str) -> None:
    call = parsed({"reasoning_effort"}, output_config={"effort": effort})
    assert (call.template_arguments, call.warnings) == ({"reasoning_effort": level}, ())
    assert "output_config.effort has no effect" in parsed(output_config={"effort": effort}).warnings[0]


def test_context_management_is_ignored_with_a_warning() -> None:
    (warning,) = parsed(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}).warnings
    assert warning.startswith("context_management is ignored")
    assert parsed(context_management={}, mcp_servers=[], container=None).warnings == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}}, "container"),
        ({"output_format": {"type": "regex"}}, "output_format.type"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ],
)
async def test_servers_and_containers_of_anthropic_are_refused(world: World, body: Any, param: str) -> None:
    with pytest.raises(UnsupportedParameter):
        parsed(**body)
    error = (await ask(world, **body)).json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unsupported_parameter", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi."}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "STOP"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": 1}]}, "tools[0].type"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "description": 1}]}, "tools[0].description"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"thinking": "enabled"}, "thinking"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
        ({"output_config": 1}, "output_config"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"schema": {}}}, "output_format.type"),
    ],
)
async def test_errors_are_400_and_name_their_field(world: World, body: Any, param: str) -> None:
    response = await ask(world, **body)
    envelope = response.json()
    assert response.status_code == 400, response.text
    assert (envelope["type"], envelope["error"]["type"], envelope["error"]["param"]) == (
        "error",
        "invalid_request_error",
        param,
    )
    assert world.engine.requests == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_not_an_object_is_400(world: World, raw: bytes) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await world.http.post(path, content=raw)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_counting_needs_no_max_tokens() -> None:
    body = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    assert parse_count_tokens(json.dumps(body).encode(), set()).messages == ASKED["messages"]
    with pytest.raises(InvalidRequest, match="max_tokens"):
        parse_messages(json.dumps(body).encode(), set())
