"""Recorded ids are continued whatever the answer contains, as far as the template keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.contract.identifiers import new_turn_id
from proxy.contract.turn import Continuation
from proxy.tokens.canonical import normalise, tools_hash
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.output import output_format
from proxy.tokens.prefix import Conversation, KnownTurn, PromptPlan, behind, plan_branch, plan_continuation
from proxy.tokens.reasoning import Reasoning
from proxy.tokens.shortcut import Shortcuts
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.families import FAMILIES, load
from tests.proxy.tokens.pieces import text_and_calls, told
from tests.proxy.tokens.test_output import USER, message, tools_of

TOOLS = tools_of([("look", {"at": "x", "near": True})])
AGAIN = {"role": "user", "content": "And then?"}
THINKS = [name for name, family in FAMILIES.items() if family.reasoning]
STRIPS = {"qwen3", "qwen3_thinking", "r1"}
"""Templates that leave earlier reasoning out after the next user message."""


def conversation(messages: list[dict[str, Any]], **arguments: Any) -> Conversation:
    return Conversation(
        messages=[normalise(each) for each in messages],
        tools=TOOLS,
        tools_hash=tools_hash(TOOLS, arguments),
        arguments=arguments,
    )


class Agent:
    """A client's conversation, and its recorded turns."""

    def __init__(self, name: str, *, echoes_reasoning: bool = False, whole: bool = False) -> None:
        self.template = load(name)
        self.format = output_format(self.template, reasoning_parser="think")
        self.shortcuts = None if whole else Shortcuts(self.template, behind)
        self.echoes_reasoning = echoes_reasoning
        self.messages: list[dict[str, Any]] = [USER]
        self.plan = plan_branch(self.template, conversation(self.messages), [])
        self.parent: KnownTurn | None = None

    def answer(self, thought: str, text: str, calls: int) -> None:
        """Record an answer in ids that the tokenizer would not choose; the client keeps the parsed message."""
        prompt = self.template.tail_text(self.plan.input_ids)
        inside = self.format.opens_reasoning(prompt)
        written = f"{thought}\n</think>\n\n" if inside else f"<think>\n{thought}\n</think>\n\n" if thought else ""
        answer = message([("look", {"at": 'é\n"}', "near": True})] * calls, text)
        plain = self.template.render([USER, answer], None, generation_prompt=False)
        opening = self.template.render([USER], None, generation_prompt=True).removesuffix("<think>\n")
        written += (
            plain.removeprefix(opening).removeprefix("<think>\n\n</think>\n\n").removesuffix(self.template.closing)
        )
        output = (*(token for sign in _tokens(self.template, written) for token in sign), self.template.stop_ids[0])
        path = self.plan.input_ids + output
        self.parent = KnownTurn(id=new_turn_id(), path_ids=path, tools_hash=tools_hash(TOOLS, {}))
        hidden = self.template.special_ids - self.template.added_ids(self.format.kept_texts)
        shown = TokenDecoder(self.template.tokenizer, hidden=hidden).text(output)
        self.messages.append(
            self.echo(told(self.format.start(calls_allowed=True, in_reasoning=inside, tools=TOOLS), [shown]))
        )
        assert len(self.messages[-1].get("tool_calls", ())) == calls
        assert "think>" not in str(self.messages[-1])

    def echo(self, events: list[Any]) -> dict[str, Any]:
        """Return the message with rewritten arguments and ids."""
        text, calls = text_and_calls(events)
        echoed: dict[str, Any] = {"role": "assistant", "content": text or None}
        if self.echoes_reasoning:
            echoed["reasoning_content"] = "".join(event.text for event in events if isinstance(event, Reasoning))
        if calls:
            echoed["tool_calls"] = [
                {
                    "id": f"call_{call.index}_of_my_own",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), indent=1)},
                }
                for call in calls
            ]
        return echoed

    def goes_on(self, *more: dict[str, Any], **arguments: Any) -> PromptPlan:
        covered = len(self.messages)
        self.messages += more
        assert self.parent is not None
        asked = conversation(self.messages, **arguments)
        self.plan = plan_continuation(self.template, asked, self.parent, covered, self.shortcuts)
        if self.plan.continuation is Continuation.EXACT:
            assert self.plan.input_ids[: self.plan.prefix_tokens] == self.parent.path_ids
        return self.plan

    def tool_results(self, count: int) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": f"call_{index}_of_my_own", "content": "a tree"} for index in range(count)
        ]


def _tokens(template: ChatTemplate, text: str) -> list[tuple[int, ...]]:
    """Return ids of `text`, character by character except for the markers."""
    split: list[str] = []
    while text:
        marker = next((each for each in (*_markers(template), text[0]) if text.startswith(each)), "")
        split.append(marker)
        text = text[len(marker) :]
    return [template.encode(piece) for piece in split]


def _markers(template: ChatTemplate) -> tuple[str, ...]:
    return tuple(text for text in output_format(template).kept_texts if template.added_ids((text,)))


@pytest.mark.parametrize("whole", [False, True], ids=["short", "whole"])
@pytest.mark.parametrize("echoes", [False, True], ids=["drops", "echoes"])
@pytest.mark.parametrize("thought", ["", "hm"], ids=["plain", "thinks"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "r1"])
def test_a_tool_loop_continues_exactly(name: str, thought: str, echoes: bool, whole: bool) -> None:
    agent = Agent(name, echoes_reasoning=echoes, whole=whole)
    for calls in (1, 1 if agent.template.single_calls else 2, 1):
        agent.answer(thought, "" if name.startswith(("llama3", "mistral_list")) else "I look.", calls)
        plan = agent.goes_on(*agent.tool_results(calls))
        assert plan.continuation is Continuation.EXACT
        assert "a tree" in agent.template.tokenizer.decode(plan.new_ids)
        assert "look" not in agent.template.tokenizer.decode(plan.new_ids)


def test_a_template_that_never_writes_thoughts_again_retemplates_each_time() -> None:
    agent = Agent("r1")
    agent.answer("hm", "I look.", 1)
    assert agent.goes_on(*agent.tool_results(1)).continuation is Continuation.RETEMPLATED


@pytest.mark.parametrize("whole", [False, True], ids=["short", "whole"])
@pytest.mark.parametrize("echoes", [False, True], ids=["drops", "echoes"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_user_speaks_again(name: str, echoes: bool, whole: bool) -> None:
    agent = Agent(name, echoes_reasoning=echoes, whole=whole)
    agent.answer("hm", "So it is.", 0)
    plan = agent.goes_on(AGAIN)
    assert plan.continuation is (Continuation.RETEMPLATED if name in STRIPS else Continuation.EXACT)
    if name in STRIPS:
        text = agent.template.tokenizer.decode(plan.input_ids, skip_special_tokens=False)
        assert "hm" not in text
        assert "So it is." in text


@pytest.mark.parametrize("name", sorted(STRIPS))
def test_a_thought_anywhere_in_the_loop_is_stripped_when_the_user_speaks_again(name: str) -> None:
    agent = Agent(name)
    agent.answer("hm", "", 1)
    agent.goes_on(*agent.tool_results(1))
    agent.answer("", "So it is.", 0)
    assert agent.goes_on(AGAIN).continuation is Continuation.RETEMPLATED
    agent.answer("", "Then that.", 0)
    again = agent.goes_on(AGAIN)
    assert again.continuation is (Continuation.EXACT if name == "qwen3" else Continuation.RETEMPLATED)


@pytest.mark.parametrize("name", ["qwen3", *(name for name, family in FAMILIES.items() if not family.reasoning)])
def test_without_thoughts_the_user_may_speak_again(name: str) -> None:
    agent = Agent(name)
    for _ in range(3):
        agent.answer("", "So it is.", 0)
        assert agent.goes_on(AGAIN).continuation is Continuation.EXACT


@pytest.mark.parametrize("name", THINKS)
def test_a_thought_that_was_cut_off(name: str) -> None:
    """It never ended, so the test must show that a template which strips thoughts strips this one."""
    agent = Agent(name)
    agent.answer("", "", 0)
    assert agent.parent is not None
    opened = () if agent.format.opens_reasoning(agent.template.tail_text(agent.plan.input_ids)) else ("<think>",)
    output = agent.template.encode("".join(opened) + "\nhm, le")
    agent.parent = KnownTurn(
        id=agent.parent.id, path_ids=agent.plan.input_ids + output, tools_hash=agent.parent.tools_hash
    )
    plan = agent.goes_on(AGAIN)
    assert plan.continuation is (Continuation.RETEMPLATED if name in STRIPS else Continuation.EXACT)


def test_other_arguments_of_the_template_are_an_edit() -> None:
    agent = Agent("qwen3")
    agent.answer("", "So it is.", 0)
    assert agent.goes_on(AGAIN, enable_thinking=False).continuation is Continuation.EDITED
