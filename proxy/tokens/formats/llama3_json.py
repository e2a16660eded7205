"""The format of Llama 3.1 to 3.3: the answer is `{"name": …, "parameters": {…}}`, bare or behind `<|python_tag|>`.

Several calls are separated by `;` or a line break. Some models write `"type": "function"` before the name.

A bare object is a call only at the beginning of an answer, and only if its first key is one of a call's: other JSON
answers stream as text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from proxy.grammars.nodes import Node, any_text, either, json_value, optional, regex, sequence, tag, text
from proxy.tokens.formats.parsing import CallParser, Tools, json_call
from proxy.tokens.formats.tool_format import AllowedCall, ToolFormat
from proxy.tokens.scanning import JsonEnd

_TAG = "<|python_tag|>"
_FIRST_KEYS = ('"name"', '"type"', '"parameters"', '"arguments"')


class Llama3JsonFormat(ToolFormat):
    """One JSON object with `name` and `parameters` at the beginning of an answer or behind a tag."""

    name = "llama3_json"
    markers = (_TAG,)
    trigger = _TAG
    separator = "; "

    def writes(self, template: str) -> bool:
        return _TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    def parser(self, tools: Tools | None = None) -> CallParser:
        return Llama3JsonParser(tools)

    def call_tag(self, call: AllowedCall) -> Node:
        name = json.dumps(call.name, ensure_ascii=False)
        return tag(f'{{"name": {name}, "parameters": ', json_value(call.schema), "}")

    def text_or_calls(self, calls: Sequence[AllowedCall], *, parallel: bool, excludes: Sequence[str]) -> Node:
        # A bare call has no trigger, so an answer is either calls from its beginning, or text that begins unlike one.
        plain = sequence(regex(r"\s{0,8}[^\s{<]"), any_text(_TAG, *excludes))
        return either(sequence(optional(text(_TAG)), self.only_calls(calls, parallel=parallel)), plain)


class Llama3JsonParser(CallParser):
    """Parses calls at the beginning of an answer or behind the tag. Text may come before a tag and behind the last
    call."""

    openings = (_TAG,)
    separator = ";"

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._pieces_before_body = 0
        self._end = JsonEnd()
        self._step = self._bare

    def _bare(self) -> bool:
        """A place where a call needs no tag: the beginning of the answer, and behind another call."""
        self._consume_space(self._space)
        found = self._next((_TAG, "{"))
        if found is None:
            return False
        self._step = self._object if found == "{" else self._text
        return True

    def _begin_call(self, marker: str) -> None:
        self._step = self._tagged

    def _tagged(self) -> bool:
        self._consume_space(self._call)
        return self._expect({"{": self._object})

    def _object(self) -> bool:
        self._pieces_before_body = len(self._call)
        self._end = JsonEnd()
        self._end.find("{", 0)
        self._consume(self._at + 1, self._call)
        self._step = self._first_key
        return True

    def _first_key(self) -> bool:
        self._consume_space(self._call)
        return self._expect(dict.fromkeys(_FIRST_KEYS, self._body))

    def _body(self) -> bool:
        end = self._end.find(self._window, self._at)
        self._consume(len(self._window) if end is None else end, self._call)
        if end is None:
            return False
        call = json_call("".join(self._call[self._pieces_before_body :]))
        self._end_call(call)
        if call is not None:
            self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        self._consume_space(self._space)
        found = self._next((_TAG, "{", ";"))
        if found is None:
            return False
        if found == ";":
            self._consume(self._at + 1, self._space)
        self._step = self._bare
        return True
