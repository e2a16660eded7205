"""Write an answer as token ids, in the form of the model's template and with its stop token."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proxy.engines.scripted.matching import END_THINK, THINK, Chosen, Opening
from proxy.engines.scripted.script import MESSAGE, Rule, fill, fill_all
from proxy.errors import InvalidRequest
from proxy.settings import ConfigurationError
from proxy.tokens.template import ChatTemplate

# Answers to remember: encoding one takes far longer than sending it.
_REMEMBERED = 4096
# Longer answers are encoded each time, because thousands of them would fill the memory.
_REMEMBERED_TOKENS = 512
_PROBE = "PROBE1"
_QUESTION = {"role": "user", "content": "x"}

_Key = tuple[int, tuple[tuple[str, str], ...], Opening]


class AnswerWriter:
    """Writes answers, and remembers them. Raises ConfigurationError for a template that cannot render an answer."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._stop_ids = frozenset(template.stop_ids)
        closing = template.encode(template.closing.lstrip())[:1]
        self._end = closing[0] if closing and closing[0] in self._stop_ids else template.stop_ids[0]
        try:
            opened = template.render([_QUESTION], None, generation_prompt=True)
            answered = self._rendered({"role": "assistant", "content": _PROBE})
        except InvalidRequest as error:
            raise ConfigurationError(f"the chat template cannot render a question and an answer: {error}") from error
        self._lead = _common_beginning(opened, answered.partition(_PROBE)[0])
        self._remembered: dict[_Key, tuple[int, ...]] = {}

    def ids(self, chosen: Chosen) -> tuple[int, ...]:
        """Return the answer's ids, with the stop token at the end unless the rule's finish is `length`."""
        key = (chosen.number, chosen.values, chosen.opening)
        found = self._remembered.get(key)
        if found is None:
            found = self._encode(chosen.rule, self._text(chosen.rule, dict(chosen.values), chosen.opening))
            # Cleared as a whole, because a script with so many different answers is rare.
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            if len(found) <= _REMEMBERED_TOKENS:
                self._remembered[key] = found
        return found

    def check(self, number: int, rule: Rule) -> None:
        """Raise ConfigurationError if the template cannot render the rule's answer."""
        try:
            self._text(rule, {MESSAGE: "x"}, Opening.PLAIN)
        except InvalidRequest as error:
            raise ConfigurationError(f"rule {number}: {error.message}") from error

    def _encode(self, rule: Rule, text: str) -> tuple[int, ...]:
        ids = self._template.encode_after(self._end, text)
        stop = next((index for index, token in enumerate(ids) if token in self._stop_ids), None)
        ids = ids[:stop]
        return ids if ids and rule.finish == "length" else (*ids, self._end)

    def _text(self, rule: Rule, values: dict[str, str], opening: Opening) -> str:
        if rule.raw is not None:
            return fill(rule.raw, values)
        given = "" if rule.reasoning is None else fill(rule.reasoning, values)
        message: dict[str, Any] = {"role": "assistant", "content": _content(rule, values)}
        if given:
            message["reasoning_content"] = given
        if rule.tool_calls:
            message["tool_calls"] = [_call(index, call, values) for index, call in enumerate(rule.tool_calls)]
        reasoning = self._template.marked_text(given)
        text = self._rendered(message).removeprefix(self._lead).removesuffix(self._template.closing)
        before, thought, after = text.partition(END_THINK)
        if reasoning and reasoning not in before:  # the template drops reasoning, or writes an empty one
            before, thought, after = f"{THINK}\n{reasoning}\n", END_THINK, after if thought else f"\n\n{text}"
        if opening is Opening.INSIDE_REASONING:
            if not thought:
                return f"\n{END_THINK}\n\n{text}"
            return before.removeprefix(THINK).lstrip("\n") + thought + after
        if opening is Opening.AFTER_REASONING and thought:
            return after.lstrip("\n")
        return before + thought + after

    def _rendered(self, answer: dict[str, Any]) -> str:
        return self._template.render([_QUESTION, answer], None, generation_prompt=False)


def _content(rule: Rule, values: dict[str, str]) -> str:
    if rule.echo:
        return values[MESSAGE]
    if rule.json is not msgspec.UNSET:
        return json.dumps(fill_all(rule.json, values), ensure_ascii=False)
    return "" if rule.text is None else fill(rule.text, values)


def _call(index: int, call: Any, values: dict[str, str]) -> dict[str, Any]:
    arguments = fill_all(call.arguments, values)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call{index:05d}", "type": "function", "function": function}


def _common_beginning(one: str, other: str) -> str:
    length = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return one[: min(len(one), len(other)) if length is None else length]
