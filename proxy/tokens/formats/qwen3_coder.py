"""Tool calls as Qwen3-Coder, Qwen3.5 and after, and Nemotron 3 write them:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values are plain text, with one line break on either side; what they are is in the tool's schema. The outer tags are
layout: the models now and then leave one of them out. `</parameter>` ends a value only where another parameter or
the end of the function follows, so that values may speak of it.
"""

from __future__ import annotations

import json
import re

from proxy.tokens.formats.calls import CallParser, NamedArguments, Tools
from proxy.tokens.formats.values import ParameterSchemas

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[^<>\s]*")
_KEY = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(CallParser):
    """A call is told at the end of its function. Of a parameter that comes twice the last value counts."""

    opening = (OPEN, _FUNCTION)

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(tools)
        self._called = ""
        self._key = ""
        self._value: list[str] = []
        self._behind_value: list[str] = []
        self._values: dict[str, str] = {}

    def _opened(self, marker: str) -> None:
        self._name = ""
        self._values = {}
        self._step = self._beginning if marker == OPEN else self._function

    def _beginning(self) -> bool:
        """Text that speaks of the tag is told at once."""
        self._take_space(self._call)
        found = self._next((_FUNCTION,))
        if not found:
            return found is not None and self._give_back()
        self._take(self._at + len(_FUNCTION), self._call)
        self._step = self._function
        return True

    def _function(self) -> bool:
        name = self._take_name(_NAME)
        if name is None:
            return False
        if not name or self._window[self._at] != ">":
            return self._give_back()
        self._take(self._at + 1, self._call)
        self._called, self._step = name, self._between
        return True

    def _between(self) -> bool:
        """Behind the function's tag: a parameter, or the end."""
        self._take_space(self._call)
        found = self._next((_PARAMETER, _FUNCTION_END))
        if not found:
            return found is not None and self._give_back()
        return self._parameter() if found == _PARAMETER else self._ended()

    def _parameter(self) -> bool:
        self._take(self._at + len(_PARAMETER), self._call)
        self._name, self._value = "", []
        self._step = self._parameter_key
        return True

    def _parameter_key(self) -> bool:
        key = self._take_name(_KEY)
        if key is None:
            return False
        if not key or self._window[self._at] != ">":
            return self._give_back()
        self._take(self._at + 1, self._call)
        self._key, self._step = key, self._parameter_value
        return True

    def _parameter_value(self) -> bool:
        if not self._take_until(_PARAMETER_END, self._value):
            return False
        self._behind_value = []
        self._take(self._at + len(_PARAMETER_END), self._behind_value)
        self._step = self._parameter_end
        return True

    def _parameter_end(self) -> bool:
        """Behind an end tag, which is part of the value unless the call goes on from there."""
        self._take_space(self._behind_value)
        found = self._next((_PARAMETER, _FUNCTION_END))
        if found is None:
            return False
        if not found:
            self._value += self._behind_value
            self._behind_value = []
            self._step = self._parameter_value
            return True
        value = "".join(self._value)
        self._values[self._key] = value.removeprefix("\n").removesuffix("\n")
        self._call += [value, *self._behind_value]
        self._value, self._behind_value = [], []
        return self._parameter() if found == _PARAMETER else self._ended()

    def _ended(self) -> bool:
        self._take(self._at + len(_FUNCTION_END), self._call)
        calls = self._calls()
        self._settle(calls)
        if calls is not None:
            self._step = self._closing
        return True

    def _calls(self) -> list[NamedArguments] | None:
        """None when the values cannot be written as JSON."""
        schemas = ParameterSchemas.of(self._called, self._tools)
        written = ", ".join(
            f"{json.dumps(key, ensure_ascii=False)}: {schemas.json_value(key, value)}"
            for key, value in self._values.items()
        )
        arguments = f"{{{written}}}"
        try:
            arguments.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return None
        return [(self._called, arguments)]

    def _closing(self) -> bool:
        """Drops the outer end tag behind a call."""
        self._take_space(self._space)
        found = self._next((CLOSE,))
        if found is None:
            return False
        if found:
            self._at += len(CLOSE)
            self._space = []
        self._step = self._text
        return True

    def _unsettled(self) -> list[str]:
        return [*self._value, *self._behind_value]
