"""Answers have the token ids that the template's model would write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.scripted.answers import AnswerWriter
from proxy.engines.scripted.matching import Chosen, Opening
from proxy.engines.scripted.script import Rule, ScriptedCall
from proxy.settings import ConfigurationError
from proxy.tokens.template import ChatTemplate
from tests.engines.scripted.templates import FAMILIES, LLAMA, family, own_template
from tests.proxy.tokens.models import write_model

CALLS = (ScriptedCall(name="f", arguments={"a": 1}), ScriptedCall(name="g", arguments='{"b": {1}}'))

NO_VALUES: Mapping[str, str] = {}


class Answers:
    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.writer = AnswerWriter(template)
        self._script: list[Rule] = []

    def ids(
        self, rule: Rule, opening: Opening = Opening.PLAIN, values: Mapping[str, str] = NO_VALUES
    ) -> tuple[int, ...]:
        if rule not in self._script:
            self._script.append(rule)
        number = self._script.index(rule)
        return self.writer.ids(Chosen(number=number, rule=rule, values=tuple(values.items()), opening=opening))

    def text(self, rule: Rule, opening: Opening = Opening.PLAIN, values: Mapping[str, str] = NO_VALUES) -> str:
        return str(self.template.tokenizer.decode(self.ids(rule, opening, values), skip_special_tokens=False))


@pytest.fixture(params=FAMILIES)
def any_family(request: pytest.FixtureRequest, tmp_path: Path) -> Answers:
    return Answers(family(request.param, tmp_path))


@pytest.fixture
def own() -> Answers:
    return Answers(own_template())


def test_an_answer_ends_with_the_stop_token_and_only_with_it(any_family: Answers) -> None:
    ids = any_family.ids(Rule(text="Hello there"))
    assert ids[-1] in any_family.template.stop_ids
    assert not set(ids[:-1]) & set(any_family.template.stop_ids)
    assert "Hello there" in any_family.text(Rule(text="Hello there"))


def test_an_answer_continues_the_prompt_as_the_template_writes_the_conversation(any_family: Answers) -> None:
    template = any_family.template
    question: dict[str, Any] = {"role": "user", "content": "x"}
    prompt = template.encode(template.render([question], None, generation_prompt=True))
    opening = Opening.INSIDE_REASONING if template.token_text(prompt[-1]) == "<think>" else Opening.PLAIN
    whole = template.render([question, {"role": "assistant", "content": "Hello"}], None, generation_prompt=False)
    written = (*prompt, *any_family.ids(Rule(text="Hello"), opening))
    decoded = template.tokenizer.decode(list(written), skip_special_tokens=False)
    assert decoded.rstrip().endswith(whole.rstrip()[-10:])


def test_without_an_end_for_length(own: Answers) -> None:
    assert own.ids(Rule(text="abc", finish="length")) == own.ids(Rule(text="abc"))[:-1]


def test_calls_are_in_the_templates_form(own: Answers) -> None:
    text = own.text(Rule(text="So:", tool_calls=CALLS), values={"1": "7"})
    assert text == (
        'So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": 7}}\n</tool_call><|im_end|>'
    )


def test_calls_in_another_family(tmp_path: Path) -> None:
    text = Answers(family("llama", tmp_path)).text(Rule(tool_calls=CALLS[:1]))
    assert text == '{"name": "f", "parameters": {"a": 1}}<|eot_id|>'


def test_json_and_echo_and_raw(own: Answers) -> None:
    assert own.text(Rule(json={"said": "{message}", "n": [1, None]}), values={"message": 'a"b'}) == (
        '{"said": "a\\"b", "n": [1, null]}<|im_end|>'
    )
    assert own.text(Rule(echo=True), values={"message": "as it was"}) == "as it was<|im_end|>"
    assert own.text(Rule(raw="<tool_call>{broken</tool_call>")) == "<tool_call>{broken</tool_call><|im_end|>"


THOUGHT = Rule(text="Hello", reasoning="Think.")


@pytest.mark.parametrize(
    ("name", "opening", "rule", "written"),
    [
        ("own", Opening.PLAIN, THOUGHT, "<think>\nThink.\n</think>\n\nHello<|im_end|>"),
        ("own", Opening.PLAIN, Rule(text="Hello"), "Hello<|im_end|>"),
        ("own", Opening.INSIDE_REASONING, THOUGHT, "Think.\n</think>\n\nHello<|im_end|>"),
        ("own", Opening.INSIDE_REASONING, Rule(text="Hello"), "\n</think>\n\nHello<|im_end|>"),
        ("own", Opening.AFTER_REASONING, THOUGHT, "Hello<|im_end|>"),
        ("thinking", Opening.PLAIN, Rule(text="Hello"), "<think>\n\n</think>\n\nHello<|im_end|>"),
        ("thinking", Opening.PLAIN, THOUGHT, "<think>\nThink.\n</think>\n\nHello<|im_end|>"),
        ("thinking", Opening.AFTER_REASONING, Rule(text="Hello"), "Hello<|im_end|>"),
        ("reasoner", Opening.INSIDE_REASONING, THOUGHT, "Think.\n</think>\n\nHello<|im_end|>"),
        ("llama", Opening.PLAIN, THOUGHT, "<think>\nThink.\n</think>\n\nHello<|eot_id|>"),
    ],
)
def test_reasoning_is_written_where_the_prompt_permits_it(
    tmp_path: Path, name: str, opening: Opening, rule: Rule, written: str
) -> None:
    assert Answers(family(name, tmp_path)).text(rule, opening) == written


def test_answers_are_written_once(own: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    first = own.ids(Rule(text="{message}"), values={"message": "x"})
    monkeypatch.setattr(own.writer, "_text", None)
    assert own.ids(Rule(text="{message}"), values={"message": "x"}) is first


@given(st.text())
def test_the_engines_own_tokenizer_writes_any_text(text: str) -> None:
    tokenizer = own_template().tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) <= len(text.encode())


def test_an_answer_that_the_template_refuses_is_a_fault_of_the_script(tmp_path: Path) -> None:
    refusing = LLAMA.replace("message.tool_calls[0]", "raise_exception('no tools here')")
    template = ChatTemplate.load(str(write_model(tmp_path, template=refusing.replace("bos_token", "''"))))
    with pytest.raises(ConfigurationError, match=r"rule 3: .*no tools here"):
        AnswerWriter(template).check(3, Rule(tool_calls=CALLS))
