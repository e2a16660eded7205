"""Detection of templates that strip earlier reasoning, by stand-ins for thoughts.

Clients send answers back without the reasoning that they were given. So the template renders the recorded answers
with stand-ins for their thoughts. If the stand-in is still there once more messages follow, the template would keep
the thought, and the recorded ids can be reused; otherwise it strips earlier reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from proxy.tokens.messages import Message
from proxy.tokens.reasoning import CLOSE, OPEN
from proxy.tokens.template import ChatTemplate

# The stand-in for the thought of the answer that is continued.
_STAND_IN = "\u2402thought\u2403"
# The stand-in for the thoughts of earlier answers, which a template may strip.
_EARLIER = "\u2402earlier thought\u2403"


class WithThoughts(Sequence[Message]):
    """Messages whose recorded answers have stand-ins for thoughts: in `reasoning_content` or, with `inline`, in the
    text, for templates that do not read `reasoning_content`. The first `covered` messages are recorded."""

    def __init__(self, messages: Sequence[Message], covered: int, *, inline: bool) -> None:
        self._messages = messages
        self._covered = covered
        self._inline = inline

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        return self._at(range(len(self))[index])

    def _at(self, position: int) -> Message:
        message = self._messages[position]
        if position >= self._covered or message["role"] != "assistant":
            return message
        thought = _STAND_IN if position == self._covered - 1 else _EARLIER
        if self._inline:
            return {**message, "content": f"{OPEN}\n{thought}\n{CLOSE}\n\n{message['content']}"}
        return {**message, "reasoning_content": thought}


def with_thoughts(template: ChatTemplate, messages: Sequence[Message], covered: int) -> WithThoughts:
    """Return `messages` with stand-ins for thoughts in the answers among the first `covered`."""
    return WithThoughts(messages, covered, inline=not template.writes_reasoning)


def has_stand_in(answer: Message) -> bool:
    return _STAND_IN in (answer.get("reasoning_content") or "") or _STAND_IN in answer["content"]


def keeps_stand_in(rendered: str) -> bool:
    return _STAND_IN in rendered
