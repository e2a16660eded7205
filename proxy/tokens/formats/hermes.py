"""Tool calls as Hermes and Qwen2.5 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in the text.

The first end tag ends a call, even inside a string of its arguments: for the models it is one token, which they do
not write there.
"""

from __future__ import annotations

from proxy.tokens.formats.calls import CallParser, json_call

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(CallParser):
    """Between the tags stands one JSON object."""

    opening = (OPEN,)

    def _opened(self, marker: str) -> None:
        self._step = self._beginning

    def _beginning(self) -> bool:
        """Text that speaks of the tag is told at once."""
        self._take_space(self._call)
        found = self._next(("{",))
        if not found:
            return found is not None and self._give_back()
        self._step = self._body
        return True

    def _body(self) -> bool:
        if not self._take_until(CLOSE, self._call):
            return False
        body = "".join(self._call[1:])
        self._take(self._at + len(CLOSE), self._call)
        return self._settle(json_call(body))
