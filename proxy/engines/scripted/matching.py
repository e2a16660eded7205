"""Find the last message of a prompt and the rule that answers it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from proxy.engines.scripted.script import MESSAGE, PLACEHOLDER, Rule, Script, texts_of
from proxy.errors import InvalidRequest
from proxy.settings import ConfigurationError
from proxy.tokens.template import ChatTemplate

THINK, END_THINK = "<think>", "</think>"
# Tokens at the end of a prompt to decode first; the window doubles until it holds the last message.
_FIRST_WINDOW = 64
# Decoded ends of prompts to remember; benchmarks send the same ones again and again.
_REMEMBERED = 4096
# Longer ends of prompts are decoded each time, because thousands of them would fill the memory.
_REMEMBERED_TOKENS = 512
_PROBE, _NEXT_PROBE = "PROBE1", "PROBE2"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "tool", "arguments": "{}"}}


class Opening(StrEnum):
    """Where the answer begins: outside any reasoning, inside reasoning that the prompt opened, or after reasoning
    that the prompt also closed."""

    PLAIN = "plain"
    INSIDE_REASONING = "inside_reasoning"
    AFTER_REASONING = "after_reasoning"


class LastMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The last message that is not the assistant's."""

    role: str
    text: str
    opening: Opening = Opening.PLAIN


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the template writes before and after a message; `separator` is between two tool results of one
    block."""

    role: str
    header: str
    end: str
    separator: str = ""


class PromptReader:
    """Finds the last message from the end of the prompt, so its cost does not grow with the conversation.

    It learns the template's text around a message by rendering messages with known content. Raises ConfigurationError
    for a template that writes nothing around them.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        answered = [_message("user", "x"), _message("assistant", _PROBE)]
        self._closing = self._written(answered).rpartition(_PROBE)[2]
        self._frames = self._find_frames()
        past = [*answered, _message("user", _NEXT_PROBE)]  # templates may render the last answer differently
        header = self._written(past).partition(_PROBE)[0].removeprefix(self._written(past[:1])).rstrip()
        self._answer_mark = template.encode(header) if header else template.encode(self._closing.strip())
        self._opens_with_mark = bool(header)
        self._remembered: dict[tuple[int, ...], LastMessage | None] = {}

    def read(self, ids: Sequence[int]) -> LastMessage:
        """Return the last message: decode larger and larger ends of the prompt until one holds a message's start."""
        size = _FIRST_WINDOW
        while True:
            window = tuple(ids[-size:])
            if window in self._remembered:
                found = self._remembered[window]
            else:
                found = self._find(self._template.decode(window), whole=size >= len(ids))
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                if len(window) <= _REMEMBERED_TOKENS:
                    self._remembered[window] = found
            if found is not None:
                return found
            size *= 2

    def turn(self, ids: Sequence[int]) -> int:
        """Return the number of the answer that the prompt asks for, from 1."""
        answers = _count(list(ids), self._answer_mark)
        return answers if self._opens_with_mark else answers + 1

    def _find(self, text: str, *, whole: bool) -> LastMessage | None:
        best, start = None, -1
        for frame in self._frames:
            found = text.rfind(frame.header)
            if found > start or (best is not None and found == start >= 0 and len(frame.header) > len(best.header)):
                best, start = frame, found
        end = text.rstrip()
        opening = Opening.PLAIN
        if end.endswith(THINK):
            opening = Opening.INSIDE_REASONING
        elif end.endswith(END_THINK):
            opening = Opening.AFTER_REASONING
        if best is None:
            if not whole:
                return None
            return LastMessage(role="prompt", text=self._template.plain(text), opening=opening)
        content = text[start + len(best.header) :].partition(best.end)[0]
        if best.separator:
            content = content.rpartition(best.separator)[2]
        return LastMessage(role=best.role, text=self._template.plain(content), opening=opening)

    def _find_frames(self) -> list[_Frame]:
        asked = [_message("user", "x"), _message("assistant", _PROBE), _message("user", _NEXT_PROBE)]
        between = self._written(asked).partition(_PROBE)[2]
        header, _, end = between.removeprefix(self._closing).partition(_NEXT_PROBE)
        if not header.strip() or not end.strip():
            raise ConfigurationError("the chat template writes nothing around a message to recognise it by")
        frames = [_Frame(role="user", header=header, end=end.rstrip())]
        return frames + self._tool_frame() + self._system_frame()

    def _tool_frame(self) -> list[_Frame]:
        called = {**_message("assistant", ""), "tool_calls": [_CALL, {**_CALL, "id": "call00002"}]}
        results = [
            {**_message("tool", text), "tool_call_id": call["id"], "name": "tool"}
            for text, call in zip((_PROBE, _NEXT_PROBE), called["tool_calls"], strict=True)
        ]
        return self._frame_after_answer("tool", [_message("user", "x"), called, *results])

    def _system_frame(self) -> list[_Frame]:
        asked = [_message("user", "x"), _message("assistant", "y")]
        return self._frame_after_answer("system", [*asked, _message("system", _PROBE)])

    def _frame_after_answer(self, role: str, messages: list[dict[str, Any]]) -> list[_Frame]:
        """Return no frame if the template does not accept such messages after an answer."""
        try:
            text = self._written(messages)
        except InvalidRequest:
            return []
        before, _, rest = text.partition(_PROBE)
        separator, several, end = rest.partition(_NEXT_PROBE)
        header = before.rpartition(self._closing)[2]
        if not several:
            separator, end = "", rest
        if not header.strip() or not end.strip():
            return []
        return [_Frame(role=role, header=header, end=end.rstrip(), separator=separator)]

    def _written(self, messages: list[dict[str, Any]]) -> str:
        """Return the rendered text after encoding and decoding, which may change white space, as prompts have it."""
        text = self._template.render(messages, None, generation_prompt=False)
        return self._template.decode(self._template.encode(text))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _count(ids: list[int], mark: Sequence[int]) -> int:
    """Return the number of times that `mark` occurs in `ids`."""
    first, length = mark[0], len(mark)
    count = at = 0
    try:
        while True:
            at = ids.index(first, at)
            count += ids[at : at + length] == list(mark)
            at += 1
    except ValueError:
        return count


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The rule for an answer, its number from 1, and the values of its placeholders."""

    number: int
    rule: Rule
    values: tuple[tuple[str, str], ...]
    opening: Opening


class NoRule(Exception):
    """No rule of the script answers this prompt."""


class Rules:
    """Chooses rules of a script; `used` counts the answers of each rule."""

    def __init__(self, script: Script, reader: PromptReader) -> None:
        self._reader = reader
        self.used = [0] * len(script.rule)
        self._rules = [
            (rule, None if rule.match.regex is None else re.compile(rule.match.regex), _placeholders(rule))
            for rule in script.rule
        ]

    def choose(self, ids: Sequence[int]) -> Chosen:
        """Return the first rule that matches and has uses left. Raises NoRule."""
        message = self._reader.read(ids)
        turn: int | None = None
        for index, (rule, pattern, placeholders) in enumerate(self._rules):
            match = rule.match
            if (
                (rule.times is not None and self.used[index] >= rule.times)
                or (match.role is not None and match.role != message.role)
                or (match.contains is not None and match.contains not in message.text)
            ):
                continue
            if match.turn is not None:
                turn = self._reader.turn(ids) if turn is None else turn
                if turn != match.turn:
                    continue
            found = None if pattern is None else pattern.search(message.text)
            if pattern is not None and found is None:
                continue
            self.used[index] += 1
            values = [(name, _value(name, message.text, found)) for name in placeholders]
            return Chosen(
                number=index + 1,
                rule=rule,
                values=tuple((name, value) for name, value in values if value is not None),
                opening=message.opening,
            )
        raise NoRule(
            f"no rule of the script answers the last message, of role {message.role}: {message.text[:200]!r}"
        )


def _placeholders(rule: Rule) -> tuple[str, ...]:
    names = {name for _, text in texts_of(rule) for name in PLACEHOLDER.findall(text)}
    return tuple(sorted(names | {MESSAGE} if rule.echo else names))


def _value(name: str, message: str, found: re.Match[str] | None) -> str | None:
    """Return the value of a placeholder; None for braces that are not one."""
    if name == MESSAGE:
        return message
    if found is None:
        return None
    try:
        return found[int(name) if name.isdecimal() else name] or ""
    except IndexError:
        return None
