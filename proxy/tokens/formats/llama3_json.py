"""Tool calls as Llama 3.1 to 3.3 write them: the answer is `{"name": …, "parameters": {…}}`, bare or behind
`<|python_tag|>`, several separated by `;` or a line break. Some write `"type": "function"` before the name.

A bare object is a call only where the answer begins with it, and only when its first key is one of a call's: other
JSON answers stream as the text that they are.
"""

from __future__ import annotations

from proxy.tokens.formats.calls import CallParser, Tools, json_call
from proxy.tokens.scanning import JsonEnd

TAG = "<|python_tag|>"
_FIRST_KEYS = ('"name"', '"type"', '"parameters"', '"arguments"')


class Llama3JsonParser(CallParser):
    """Calls stand at the beginning, or behind the tag; text may come before a tag and behind the last call."""

    opening = (TAG,)
    separator = ";"

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._before = 0
        self._end = JsonEnd()
        self._step = self._bare

    def _bare(self) -> bool:
        """Where a call may stand without a tag: at the beginning, and behind another call."""
        self._take_space(self._space)
        found = self._next((TAG, "{"))
        if found is None:
            return False
        self._step = self._object if found == "{" else self._text
        return True

    def _opened(self, marker: str) -> None:
        self._step = self._tagged

    def _tagged(self) -> bool:
        self._take_space(self._call)
        found = self._next(("{",))
        if not found:
            return found is not None and self._give_back()
        self._step = self._object
        return True

    def _object(self) -> bool:
        self._before = len(self._call)
        self._end = JsonEnd()
        self._end.find("{", 0)
        self._take(self._at + 1, self._call)
        self._step = self._first_key
        return True

    def _first_key(self) -> bool:
        self._take_space(self._call)
        found = self._next(_FIRST_KEYS)
        if not found:
            return found is not None and self._give_back()
        self._step = self._body
        return True

    def _body(self) -> bool:
        end = self._end.find(self._window, self._at)
        self._take(len(self._window) if end is None else end, self._call)
        if end is None:
            return False
        call = json_call("".join(self._call[self._before :]))
        self._settle(call)
        if call is not None:
            self._step = self._separator
        return True

    def _separator(self) -> bool:
        self._take_space(self._space)
        found = self._next((TAG, "{", ";"))
        if found is None:
            return False
        if found == ";":
            self._take(self._at + 1, self._space)
        self._step = self._bare
        return True
