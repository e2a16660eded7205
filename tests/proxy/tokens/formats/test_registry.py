"""A new tool-call format needs one class and one entry of the registry, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance
import pytest

from proxy.app import create_app
from proxy.calls.call import ModelCall, RequestedSampling, ToolChoice, ToolUse
from proxy.calls.constraints import AnswerConstraints
from proxy.engines.grammars import constraint_for
from proxy.grammars.nodes import Node, json_value, tag
from proxy.settings import ConfigurationError, load_settings
from proxy.tokens.formats import TOOL_FORMATS, AllowedCall, CallParser, ToolCall, ToolFormat, Tools, check_tool_parser
from proxy.tokens.formats.parsing import json_arguments
from proxy.tokens.output import OutputFormat, output_format
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import write_model
from tests.proxy.tokens.pieces import told

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '@call ' + call.function.name + ' ' + call.function.arguments | tojson + '@end' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CALL = '@call add {"a": 1}@end'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


class AtFormat(ToolFormat):
    """`@call name {…}@end`."""

    name = "at"
    markers = ("@call ", "@end")
    call_end = "@end"
    trigger = "@call "

    def writes(self, template: str) -> bool:
        return "@call " in template

    def parser(self, tools: Tools | None = None) -> CallParser:
        return AtParser(tools)

    def call_tag(self, call: AllowedCall) -> Node:
        return tag(f"@call {call.name} ", json_value(call.schema), "@end")


class AtParser(CallParser):
    openings = ("@call ",)

    def _begin_call(self, marker: str) -> None:
        self._step = self._body

    def _body(self) -> bool:
        if not self._consume_until("@end", self._call):
            return False
        name, _, arguments = "".join(self._call[1:]).partition(" ")
        self._consume(self._at + len("@end"), self._call)
        written = json_arguments(arguments)
        return self._end_call(None if written is None else [(name, written)])


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_FORMATS, AtFormat.name, AtFormat())


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate.load(str(write_model(tmp_path, template=TEMPLATE)))


def test_an_unregistered_format_is_unknown(template: ChatTemplate) -> None:
    assert output_format(template) == OutputFormat()
    with pytest.raises(ConfigurationError, match="no format 'at'"):
        output_format(template, tool_parser="at")


@pytest.mark.usefixtures("registered")
def test_a_registered_format_is_detected_and_can_be_chosen(template: ChatTemplate) -> None:
    assert output_format(template).tool_format is TOOL_FORMATS["at"]
    settings = load_settings(None, {"run": {"tool_parser": "at"}})
    assert output_format(template, tool_parser=settings.run.tool_parser).tool_format is TOOL_FORMATS["at"]


@pytest.mark.usefixtures("registered")
def test_its_calls_are_parsed_while_text_streams(template: ChatTemplate) -> None:
    parser = output_format(template).start(calls_allowed=True, tools=TOOLS)
    assert [parser.feed(piece) for piece in ("I ad", "d. @ca", "ll add {", '"a": 1}', "@end")] == [
        ["I ad"],
        ["d."],
        [],
        [],
        [ToolCall(index=0, name="add", arguments='{"a": 1}')],
    ]
    assert parser.finish() == []
    rendered = template.render(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}],
        None,
        generation_prompt=False,
    )
    assert CALL in rendered
    bad = "@call add {a}@end"
    assert told(output_format(template).start(calls_allowed=True), list(bad)) == [bad]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("answer", "allowed"),
    [(CALL, True), (CALL + CALL, True), ("So: " + CALL, False), ('@call add {"a": "1"}@end', False), ("No.", False)],
)
def test_its_grammar_holds_the_model_to_the_tools(template: ChatTemplate, answer: str, allowed: bool) -> None:
    call = ModelCall(
        model="m",
        messages=[],
        sampling=RequestedSampling(),
        body={},
        tools=TOOLS,
        tool_choice=ToolChoice(use=ToolUse.REQUIRED),
    )
    promised = AnswerConstraints(template).of(call, output_format(template))
    assert promised is not None
    constraint = constraint_for(promised.constraint(in_reasoning=False), "llguidance")
    tokenizer = llguidance.LLTokenizer(
        template.tokenizer.to_str(), n_vocab=template.vocabulary_size, eos_token=list(template.stop_ids)
    )
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("ebnf", constraint.text), log_level=0)
    ids = [*template.encode(answer), min(template.stop_ids)]
    assert (matcher.validate_tokens(ids) == len(ids)) is allowed


def test_an_unknown_parser_is_refused_with_the_accepted_names() -> None:
    for name in ("auto", "none", *TOOL_FORMATS):
        check_tool_parser(name)
    settings = load_settings(None, {"run": {"tool_parser": "xml"}, "engine": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(ConfigurationError, match=r"^run\.tool_parser: ") as refused:
        create_app(settings)
    for name in ("auto", "none", *TOOL_FORMATS):
        assert f"'{name}'" in str(refused.value)
