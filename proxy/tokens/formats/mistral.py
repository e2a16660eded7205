"""Tool calls as Mistral's models write them, in two forms.

Up to tokenizer v7 one list holds all calls: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]`. From v11 on
each call has a marker of its own: `[TOOL_CALLS]name[ARGS]{…}`, at first with `[CALL_ID]id` before the arguments.
Where a tokenizer hides the inner markers the arguments follow the name at once.
"""

from __future__ import annotations

import re

from proxy.tokens.formats.calls import CallParser, NamedArguments, Tools, json_arguments, json_call, json_calls
from proxy.tokens.scanning import JsonEnd

OPEN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_NAME = re.compile(r'[^\s\[\]{}<>"]*')


class MistralParser(CallParser):
    """A list with a malformed call in it is text as a whole. The ids that a model writes are passed over: it may
    write the same one again and again."""

    opening = (OPEN,)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._called = ""
        self._before = 0
        self._end = JsonEnd()

    def _opened(self, marker: str) -> None:
        self._name = self._called = ""
        self._step = self._beginning

    def _beginning(self) -> bool:
        self._take_space(self._call)
        found = self._next((OPEN, "[", "{"))
        if found is None:
            return False
        if found == OPEN:
            return self._give_back()
        if found == "[":
            return self._list()
        if found == "{":
            return self._json()
        self._step = self._named
        return True

    def _named(self) -> bool:
        name = self._take_name(_NAME)
        if not name:
            return name is not None and self._give_back()
        self._called, self._step = name, self._behind_name
        return True

    def _behind_name(self) -> bool:
        self._take_space(self._call)
        found = self._next((ARGUMENTS, CALL_ID, "{"))
        if not found:
            return found is not None and self._give_back()
        if found == "{":
            return self._json()
        self._take(self._at + len(found), self._call)
        self._name = ""
        self._step = self._behind_marker if found == ARGUMENTS else self._id
        return True

    def _id(self) -> bool:
        if self._take_name(_NAME) is None:
            return False
        self._step = self._behind_id
        return True

    def _behind_id(self) -> bool:
        found = self._next((ARGUMENTS, "{"))
        if not found:
            return found is not None and self._give_back()
        if found == "{":
            return self._json()
        self._take(self._at + len(found), self._call)
        self._step = self._behind_marker
        return True

    def _behind_marker(self) -> bool:
        self._take_space(self._call)
        found = self._next(("{",))
        if not found:
            return found is not None and self._give_back()
        return self._json()

    def _list(self) -> bool:
        """Text that speaks of the marker is told at once: a list of calls goes on with an object."""
        self._json()
        self._end.find("[", 0)
        self._take(self._at + 1, self._call)
        self._step = self._in_list
        return True

    def _in_list(self) -> bool:
        self._take_space(self._call)
        found = self._next(("{",))
        if not found:
            return found is not None and self._give_back()
        self._step = self._body
        return True

    def _json(self) -> bool:
        self._before = len(self._call)
        self._end = JsonEnd()
        self._step = self._body
        return True

    def _body(self) -> bool:
        end = self._end.find(self._window, self._at)
        self._take(len(self._window) if end is None else end, self._call)
        return end is not None and self._settle(self._calls("".join(self._call[self._before :])))

    def _calls(self, body: str) -> list[NamedArguments] | None:
        if self._called:
            arguments = json_arguments(body)
            return None if arguments is None else [(self._called, arguments)]
        return json_calls(body) if body.startswith("[") else json_call(body)
