"""The format of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in the text."""

from __future__ import annotations

import json

from proxy.grammars.nodes import Node, json_value, tag
from proxy.tokens.formats.parsing import CallParser, Tools, json_call
from proxy.tokens.formats.tool_format import AllowedCall, ToolFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesFormat(ToolFormat):
    """One JSON object with `name` and `arguments` between two tags."""

    name = "hermes"
    markers = (_OPEN, _CLOSE)
    call_end = _CLOSE
    trigger = _OPEN
    separator = "\n"

    def writes(self, template: str) -> bool:
        # GLM's templates have the same tag with `<arg_key>` elements in it, which nothing here parses.
        return _OPEN in template and "<arg_key>" not in template

    def parser(self, tools: Tools | None = None) -> CallParser:
        return HermesParser(tools)

    def call_tag(self, call: AllowedCall) -> Node:
        name = json.dumps(call.name, ensure_ascii=False)
        begin = f'{_OPEN}\n{{"name": {name}, "arguments": '
        return tag(begin, json_value(call.schema), f"}}\n{_CLOSE}")


class HermesParser(CallParser):
    """Parses calls in the Hermes format.

    The first end tag ends a call, even inside a string of its arguments: for the models it is one token, which they
    do not write there.
    """

    openings = (_OPEN,)

    def _begin_call(self, marker: str) -> None:
        self._step = self._before_body

    def _before_body(self) -> bool:
        self._consume_space(self._call)
        return self._expect({"{": self._body})

    def _body(self) -> bool:
        if not self._consume_until(_CLOSE, self._call):
            return False
        body = "".join(self._call[1:])
        self._consume(self._at + len(_CLOSE), self._call)
        return self._end_call(json_call(body))
