"""The formats of Mistral's models, which have three layouts.

Up to tokenizer v7 one list holds all calls: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]`. From v11 on
each call has a marker of its own: `[TOOL_CALLS]name[ARGS]{…}`, at first with `[CALL_ID]id` before the arguments.
Where a tokenizer hides the inner markers, the arguments follow the name at once. One parser reads all of them; the
grammar is that of the layout that the chat template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from proxy.grammars.nodes import (
    Node,
    json_value,
    regex,
    sequence,
    tag,
    tags_with_separator,
    text,
    triggered_tags,
)
from proxy.tokens.formats.parsing import CallParser, NamedArguments, Tools, json_arguments, json_call, json_calls
from proxy.tokens.formats.tool_format import AllowedCall, ToolFormat, check_plain_name
from proxy.tokens.scanning import JsonEnd

_OPEN = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_NAME = re.compile(r'[^\s\[\]{}<>"]*')


class _Mistral(ToolFormat):
    """The common part of the three layouts."""

    name = "mistral"
    markers = (_OPEN, _CALL_ID, _ARGUMENTS)
    trigger = _OPEN

    def writes(self, template: str) -> bool:
        return _OPEN in template

    def parser(self, tools: Tools | None = None) -> CallParser:
        return MistralParser(tools)


class MistralFormat(_Mistral):
    """All calls in one JSON list; the templates of later models select another layout."""

    def for_template(self, template: str) -> ToolFormat:
        if _CALL_ID in template:
            return _MistralWithIds()
        return _MistralNamed() if _ARGUMENTS in template else self

    def call_tag(self, call: AllowedCall) -> Node:
        name = json.dumps(call.name, ensure_ascii=False)
        return tag(f'{{"name": {name}, "arguments": ', json_value(call.schema), "}")

    def only_calls(self, calls: Sequence[AllowedCall], *, parallel: bool) -> Node:
        listed = tags_with_separator([self.call_tag(call) for call in calls], ", ", parallel=parallel)
        return tag(f"{_OPEN}[", listed, "]")

    def text_or_calls(self, calls: Sequence[AllowedCall], *, parallel: bool, excludes: Sequence[str]) -> Node:
        # The list holds all calls of the answer, so the answer ends behind the first list.
        whole_list = self.only_calls(calls, parallel=parallel)
        return triggered_tags(self.trigger, [whole_list], parallel=False, excludes=excludes)


class _MistralNamed(_Mistral):
    """Each call behind a marker of its own, its name as plain text."""

    def call_tag(self, call: AllowedCall) -> Node:
        check_plain_name(call)
        return tag(f"{_OPEN}{call.name}{_ARGUMENTS}", json_value(call.schema), "")


class _MistralWithIds(_Mistral):
    """Each call behind a marker of its own, with an id that the model makes up between its name and arguments."""

    def call_tag(self, call: AllowedCall) -> Node:
        check_plain_name(call)
        # Mistral's templates refuse ids that are not nine letters and digits.
        content = sequence(regex("[a-zA-Z0-9]{9}"), text(_ARGUMENTS), json_value(call.schema))
        return tag(f"{_OPEN}{call.name}{_CALL_ID}", content, "")


class MistralParser(CallParser):
    """Parses calls in any of the three layouts.

    A list with a malformed call in it is text as a whole. The ids that a model writes are ignored: it may write the
    same one again and again.
    """

    openings = (_OPEN,)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._function = ""
        self._pieces_before_body = 0
        self._end = JsonEnd()

    def _begin_call(self, marker: str) -> None:
        self._name = self._function = ""
        self._step = self._after_marker

    def _after_marker(self) -> bool:
        self._consume_space(self._call)
        found = self._next((_OPEN, "[", "{"))
        if found is None:
            return False
        if found == _OPEN:
            return self._reject()
        if found == "[":
            return self._list()
        if found == "{":
            return self._json()
        self._step = self._function_name
        return True

    def _function_name(self) -> bool:
        name = self._consume_name(_NAME)
        if not name:
            return name is not None and self._reject()
        self._function, self._step = name, self._after_name
        return True

    def _after_name(self) -> bool:
        self._consume_space(self._call)
        return self._expect({_ARGUMENTS: self._arguments, _CALL_ID: self._before_call_id, "{": self._json})

    def _before_call_id(self) -> bool:
        self._consume(self._at + len(_CALL_ID), self._call)
        self._name = ""
        self._step = self._call_id
        return True

    def _call_id(self) -> bool:
        if self._consume_name(_NAME) is None:
            return False
        return self._expect({_ARGUMENTS: self._arguments, "{": self._json})

    def _arguments(self) -> bool:
        self._consume(self._at + len(_ARGUMENTS), self._call)
        self._step = self._before_object
        return True

    def _before_object(self) -> bool:
        self._consume_space(self._call)
        return self._expect({"{": self._json})

    def _list(self) -> bool:
        self._json()
        self._end.find("[", 0)
        self._consume(self._at + 1, self._call)
        self._step = self._first_of_list
        return True

    def _first_of_list(self) -> bool:
        self._consume_space(self._call)
        return self._expect({"{": self._body})

    def _json(self) -> bool:
        self._pieces_before_body = len(self._call)
        self._end = JsonEnd()
        self._step = self._body
        return True

    def _body(self) -> bool:
        end = self._end.find(self._window, self._at)
        self._consume(len(self._window) if end is None else end, self._call)
        return end is not None and self._end_call(self._calls("".join(self._call[self._pieces_before_body :])))

    def _calls(self, body: str) -> list[NamedArguments] | None:
        if self._function:
            arguments = json_arguments(body)
            return None if arguments is None else [(self._function, arguments)]
        return json_calls(body) if body.startswith("[") else json_call(body)
