from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import new_turn_id
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation
from proxy.tokens.canonical import normalise, tools_hash
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.formats.hermes import HermesParser
from proxy.tokens.prefix import Conversation, KnownTurn, PromptPlan, plan_branch, plan_continuation
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.pieces import text_and_calls, told

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a":1}}\n</tool_call>'
NAMES = st.sampled_from(["small", "shipped"])


def conversation(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(messages=[normalise(m) for m in messages], tools=tools, tools_hash=tools_hash(tools))


def echo(text: str) -> dict[str, Any]:
    """Return the assistant's message as a client sends it back, with rewritten arguments."""
    content, calls = text_and_calls(told(HermesParser(), [text]))
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": "x", "type": "function", "function": {"name": c.name, "arguments": c.arguments.replace(":", ": ")}}
            for c in calls
        ]
    return message


def first_turn(template: ChatTemplate, asked: Conversation, output: tuple[int, ...]) -> KnownTurn:
    plan = plan_branch(template, asked, [])
    return KnownTurn(id=new_turn_id(), path_ids=plan.input_ids + output, tools_hash=asked.tools_hash)


def extend(template: ChatTemplate, parent: KnownTurn, messages: list[dict[str, Any]], more: int = 1) -> PromptPlan:
    return plan_continuation(template, conversation(messages), parent, len(messages) - more)


def odd_split(template: ChatTemplate, text: str) -> tuple[int, ...]:
    """Return ids of `text` as no tokenizer would split it: byte by byte."""
    return tuple(token for character in text for token in template.encode(character))


@given(name=NAMES, question=st.text(max_size=20), answer=st.text(max_size=20), follow_up=st.text(max_size=20))
def test_recorded_ids_are_never_tokenised_again(
    templates: dict[str, ChatTemplate], name: str, question: str, answer: str, follow_up: str
) -> None:
    template = templates[name]
    stop = template.stop_ids[0]
    output = (*odd_split(template, answer), stop)
    messages = [{"role": "user", "content": question}]
    parent = first_turn(template, conversation(messages), output)
    text = TokenDecoder(template.tokenizer, hidden=template.special_ids).text(output)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
    plan = extend(template, parent, messages)
    assert plan.continuation is Continuation.EXACT
    assert plan.parent_id == parent.id
    assert plan.input_ids[: plan.prefix_tokens] == parent.path_ids
    assert plan.input_ids == parent.path_ids + plan.new_ids


@given(
    name=NAMES,
    turns=st.lists(st.sampled_from(["The answer is 3.", CALL, "Hm.\n" + CALL + "\n" + CALL, "né 🎉"]), max_size=4),
)
def test_a_conversation_grown_turn_by_turn_is_the_conversation_rendered_whole(
    templates: dict[str, ChatTemplate], name: str, turns: list[str]
) -> None:
    """With ids as the tokenizer itself splits them, reuse gives exactly the ids of a full rendering."""
    template = templates[name]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]
    plan = plan_branch(template, conversation(messages), [])
    for text in turns:
        answered = [*messages, {**echo(text)}]
        written = template.render(conversation(answered).messages, None, generation_prompt=False)
        said = written[len(template.render(conversation(messages).messages, None, generation_prompt=True)) :]
        output = template.encode(said.removesuffix(template.closing)) + template.stop_ids[:1]
        parent = KnownTurn(id=new_turn_id(), path_ids=plan.input_ids + output, tools_hash=tools_hash(None))
        messages = [*answered, {"role": "user", "content": "Go on."}]
        plan = extend(template, parent, messages)
        whole = template.encode(template.render(conversation(messages).messages, None, generation_prompt=True))
        assert plan.continuation is Continuation.EXACT
        assert plan.input_ids == whole


@pytest.mark.parametrize("cut", ["length", "stop string", "disconnect in a character"])
def test_an_answer_without_a_stop_token_is_closed_by_prompt_tokens(template: ChatTemplate, cut: str) -> None:
    text = {"length": "The ans", "stop string": "abcSTOP", "disconnect in a character": "é"}[cut]
    output = template.encode(text)
    if cut.startswith("disconnect"):
        output = output[:-1]
    parent = first_turn(template, conversation([{"role": "user", "content": "x"}]), output)
    shown = TokenDecoder(template.tokenizer, hidden=()).text(output).removesuffix("STOP")
    messages = [{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", shown), ("user", "y"))]
    plan = extend(template, parent, messages)
    assert plan.continuation is Continuation.EXACT
    assert plan.input_ids[: plan.prefix_tokens] == parent.path_ids
    assert plan.new_ids == template.encode("<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n")


def test_another_stop_token_than_the_templates_is_kept_and_closed(template: ChatTemplate) -> None:
    end_of_text = template.encode("<|endoftext|>")
    parent = first_turn(
        template, conversation([{"role": "user", "content": "x"}]), template.encode("a") + end_of_text
    )
    plan = extend(
        template, parent, [{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", "a"), ("user", "y"))]
    )
    assert plan.new_ids[:1] == template.encode("<|im_end|>")


def test_tool_calls_with_rewritten_arguments_are_reused(template: ChatTemplate) -> None:
    asked = conversation([{"role": "user", "content": "x"}], TOOLS)
    parent = first_turn(template, asked, (*template.encode(CALL), template.stop_ids[0]))
    messages = [{"role": "user", "content": "x"}, echo(CALL), {"role": "tool", "tool_call_id": "x", "content": "2"}]
    plan = plan_continuation(template, conversation(messages, TOOLS), parent, 2)
    assert plan.continuation is Continuation.EXACT
    expected = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert plan.new_ids == template.encode(expected)


def test_an_answer_that_stands_last_is_continued(template: ChatTemplate) -> None:
    parent = first_turn(
        template, conversation([{"role": "user", "content": "x"}]), (*template.encode("a"), template.stop_ids[0])
    )
    plan = extend(template, parent, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}], more=0)
    assert plan.new_ids == template.encode("\n<|im_start|>assistant\n")


def test_a_template_that_strips_reasoning_retemplates(thinking_template: ChatTemplate) -> None:
    template = thinking_template
    said = "<think>\nlong\n</think>\n\nyes"
    asked = conversation([{"role": "user", "content": "x"}])
    parent = first_turn(template, asked, (*template.encode(said), template.stop_ids[0]))
    messages = [{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", said), ("user", "y"))]
    plan = extend(template, parent, messages)
    assert plan.continuation is Continuation.RETEMPLATED
    assert plan.parent_id == parent.id
    full = template.encode(template.render(conversation(messages).messages, None, generation_prompt=True))
    assert plan.input_ids == full
    assert plan.input_ids[: plan.prefix_tokens] == parent.path_ids[: plan.prefix_tokens]
    assert plan.prefix_tokens == len(plan_branch(template, asked, []).input_ids)


def test_a_template_that_writes_the_last_answer_differently_still_reuses(thinking_template: ChatTemplate) -> None:
    template = thinking_template
    parent = first_turn(
        template,
        conversation([{"role": "user", "content": "x"}]),
        (*odd_split(template, "The answer is 3"), template.stop_ids[0]),
    )
    messages = [
        {"role": r, "content": c} for r, c in (("user", "x"), ("assistant", "The answer is 3"), ("user", "y"))
    ]
    plan = extend(template, parent, messages)
    assert plan.continuation is Continuation.EXACT
    assert plan.new_ids == template.encode("\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n")


def test_other_tools_are_an_edit_of_the_past(template: ChatTemplate) -> None:
    parent = first_turn(template, conversation([{"role": "user", "content": "x"}], TOOLS), (template.stop_ids[0],))
    messages = [{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", ""), ("user", "y"))]
    plan = plan_continuation(template, conversation(messages), parent, 2)
    assert plan.continuation is Continuation.EDITED
    assert plan.prefix_tokens == plan.input_ids.common_prefix(parent.path_ids) > 0


def test_an_answer_that_is_to_begin_with_a_text_is_prompted_with_it(template: ChatTemplate) -> None:
    asked = conversation([{"role": "user", "content": "Hi."}])
    begun = msgspec.structs.replace(asked, prefill="The answer")
    whole = template.render(asked.messages, None, generation_prompt=True)
    assert plan_branch(template, begun, []).input_ids == template.encode(whole + "The answer")
    parent = first_turn(template, asked, (*template.encode("Yes?"), template.stop_ids[0]))
    more = [*asked.messages, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "What?"}]
    plain = plan_continuation(template, conversation(more), parent, 2)
    begun = msgspec.structs.replace(conversation(more), prefill="The answer")
    plan = plan_continuation(template, begun, parent, 2)
    assert plan.continuation is Continuation.EXACT
    assert template.tokenizer.decode(list(plan.new_ids), skip_special_tokens=False) == (
        template.tokenizer.decode(list(plain.new_ids), skip_special_tokens=False) + "The answer"
    )


def test_other_arguments_of_the_template_are_an_edit_of_the_past(template: ChatTemplate) -> None:
    asked = conversation([{"role": "user", "content": "Hi."}])
    parent = first_turn(template, asked, (*odd_split(template, "The answer"), template.stop_ids[0]))
    said = [*asked.messages, {"role": "assistant", "content": "The answer"}, {"role": "user", "content": "x"}]
    more = conversation(said)
    switched = msgspec.structs.replace(more, tools_hash=tools_hash(None, {"enable_thinking": True}))
    assert plan_continuation(template, more, parent, 2).continuation is Continuation.EXACT
    assert plan_continuation(template, switched, parent, 2).continuation is Continuation.EDITED
    assert tools_hash(None, {"a": 1, "b": 2}) == tools_hash(None, {"b": 2, "a": 1}) != tools_hash(None)


def test_an_edited_history_branches_where_it_differs(template: ChatTemplate) -> None:
    turns = [
        first_turn(template, conversation([{"role": "user", "content": text}]), (template.stop_ids[0],))
        for text in ("What is 17 + 25?", "Something else")
    ]
    asked = conversation([{"role": "user", "content": "What is 17 - 25?"}])
    plan = plan_branch(template, asked, turns)
    assert (plan.continuation, plan.parent_id) == (Continuation.EDITED, turns[0].id)
    assert plan.input_ids == template.encode(template.render(asked.messages, None, generation_prompt=True))
    assert plan.prefix_tokens > len(template.encode("<|im_start|>user\nWhat is"))


def test_the_same_request_again_shares_the_whole_prompt(template: ChatTemplate) -> None:
    asked = conversation([{"role": "user", "content": "x"}])
    turn = first_turn(template, asked, (*template.encode("a"), template.stop_ids[0]))
    plan = plan_branch(template, asked, [turn])
    assert (plan.continuation, plan.new_ids) == (Continuation.EDITED, ())
    assert plan.prefix_tokens == len(plan.input_ids)


def test_prompts_without_a_common_prefix_are_new(template: ChatTemplate) -> None:
    stranger = KnownTurn(id=new_turn_id(), path_ids=TokenIds.of((300, 301)), tools_hash=tools_hash(None))
    for turns in ([], [stranger]):
        plan = plan_branch(template, conversation([{"role": "user", "content": "x"}]), turns)
        assert (plan.continuation, plan.parent_id, plan.prefix_tokens) == (Continuation.NEW, None, 0)
