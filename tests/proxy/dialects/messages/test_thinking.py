"""Thinking in Anthropic's wire format: blocks of their own, which a client may send back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import CALL, USER, World, open_world, output_ids
from tests.proxy.dialects.messages.anthropic_client import ASKED, TOOL, answer, ask, events, sdk
from tests.proxy.tokens.families import FAMILIES, load
from tests.proxy.tokens.models import MARKERS, byte_level_tokenizer, write_model

THINKERS = [name for name, family in FAMILIES.items() if family.reasoning and family.tool_format == "hermes"]
SWITCH = "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}" + (
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


def thought(name: str, text: str) -> str:
    """Return thinking as the family's models write it. Some templates end the prompt with its opening tag."""
    begun = load(name).render([USER], None, generation_prompt=True).endswith("<think>\n")
    return f"{'' if begun else '<think>' + chr(10)}{text}\n</think>\n\n"


@pytest.fixture(params=THINKERS)
async def thinking(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[World, str]]:
    async with open_world(tmp_path, load(request.param)) as world:
        yield world, request.param


@pytest.fixture
async def switched(tmp_path: Path) -> AsyncIterator[World]:
    """A model whose template can switch thinking off, such as Qwen3."""
    written = FAMILIES["qwen3"].template + SWITCH
    tokenizer = byte_level_tokenizer(markers=(*MARKERS, "<think>", "</think>"))
    template = ChatTemplate.load(str(write_model(tmp_path / "model", template=written, tokenizer=tokenizer)))
    async with open_world(tmp_path, template) as world:
        yield world


async def test_thinking_is_the_first_block(thinking: tuple[World, str]) -> None:
    world, name = thinking
    world.say(f"{thought(name, 'Hm.')}It is 42.")
    message = await answer(world)
    first, second = message["content"]
    assert (first["type"], first["thinking"]) == ("thinking", "Hm.")
    assert first["signature"]
    assert second == {"type": "text", "text": "It is 42.", "citations": None}
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]
    streamed = await events(world)
    thoughts = [event["delta"].get("thinking", "") for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(thoughts) == "Hm."
    assert streamed[-2]["usage"]["output_tokens_details"] == message["usage"]["output_tokens_details"]


async def test_without_thinking_no_thinking_tokens_are_counted(world: World) -> None:
    assert (await answer(world))["usage"]["output_tokens_details"] is None


async def test_omitted_thinking_is_an_empty_block(thinking: tuple[World, str]) -> None:
    world, name = thinking
    world.say(f"{thought(name, 'Hm.')}It is 42.")
    message = await answer(world, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.get("thinking", block.get("text")) for block in message["content"]] == ["", "It is 42."]


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_a_tool_loop_with_the_sdks_own_echo_preserves_the_tokens_of_thinking(
    thinking: tuple[World, str], display: Any
) -> None:
    world, name = thinking
    world.say(f"{thought(name, 'I add.')}{CALL}", f"{thought(name, 'Again.')}{CALL}", f"{thought(name, 'So.')}84.")
    messages: list[Any] = [USER]
    asked = {**ASKED, "messages": messages, "tools": [TOOL], "thinking": {"type": "adaptive", "display": display}}
    async with sdk(world) as client:
        for number in range(3):
            async with client.messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
            assert message.content[0].type == "thinking"
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(number)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if results:
                messages.append({"role": "user", "content": results})
    turns = await world.turns()
    continuation = "retemplated" if name == "r1" else "exact"
    assert [turn.continuation for turn in turns] == ["new", continuation, continuation]
    for index in range(2):
        path = world.engine.requests[index].input_ids + tuple(output_ids(turns[index]))
        assert (world.engine.requests[index + 1].input_ids[: len(path)] == path) == (continuation == "exact")


async def test_thinking_is_switched_off_if_the_template_can(switched: World) -> None:
    prompts = []
    bodies: list[Any] = [{}, {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}]
    for body in bodies:
        response = await ask(switched, **body)
        assert "x-base-rl-warning" not in response.headers
        ids = list(switched.engine.requests[-1].input_ids)
        prompts.append(switched.template.tokenizer.decode(ids, skip_special_tokens=False))
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[0] + "<think>\n\n</think>\n\n"
