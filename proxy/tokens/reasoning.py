"""What a model thinks before it answers: `<think>…</think>` at the beginning of its output.

Some templates open the thought in the prompt already; then the output begins inside of it, and an opening tag that
the model writes all the same is dropped. A closing tag that nothing opened is text: what stood before it was told as
the answer by then. White space around a thought is layout.
"""

from __future__ import annotations

import re

import msgspec

from proxy.tokens.scanning import Scanner

OPEN = "<think>"
CLOSE = "</think>"
_LINE_BREAKS = re.compile(r"[\r\n]*")


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks."""

    text: str


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside of a thought. Its last characters are enough."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser(Scanner):
    """Takes the thought off one answer. Tool calls in a thought are part of it, and an unclosed thought is the whole
    answer: nothing is told as the answer that the model did not mean as such."""

    def __init__(self, *, in_reasoning: bool) -> None:
        super().__init__()
        self._space: list[str] = []
        self._told: list[str | Reasoning] = []
        self._thinks = in_reasoning
        self._over = False
        self._step = self._beginning

    @property
    def thinking(self) -> bool:
        return self._thinks

    @property
    def over(self) -> bool:
        """Whether all that still comes is the answer; nothing is held back then."""
        return self._over

    def feed(self, text: str) -> list[str | Reasoning]:
        self._scan(text)
        told, self._told = self._told, []
        return told

    def finish(self) -> list[str | Reasoning]:
        """What was held back. White space at a thought's end is nothing."""
        rest = "".join([*self._space, self._window[self._at :]])
        self._space, self._window, self._at = [], "", 0
        if self._thinks:
            return [Reasoning(rest)] if rest.strip() else []
        return [rest] if rest else []

    def _beginning(self) -> bool:
        self._take_space(self._space)
        found = self._next((OPEN,))
        if found is None:
            return False
        self._at += len(found)
        self._thinks = self._thinks or bool(found)
        if self._thinks:
            self._space, self._step = [], self._thought_beginning
        else:
            self._told += self._space
            self._space, self._step = [], self._answer
        return True

    def _thought_beginning(self) -> bool:
        self._take_space([])
        if self._at == len(self._window):
            return False
        self._step = self._thought
        return True

    def _thought(self) -> bool:
        """Passes the thought on, without white space that may stand at its end."""
        came: list[str] = []
        ended = self._take_until(CLOSE, came)
        text = "".join(came)
        kept = text.rstrip()
        if kept:
            self._told.append(Reasoning("".join([*self._space, kept])))
            self._space = []
        self._space.append(text[len(kept) :])
        if ended:
            self._at += len(CLOSE)
            self._thinks, self._space, self._step = False, [], self._answer_beginning
        return ended

    def _answer_beginning(self) -> bool:
        self._take(self._match(_LINE_BREAKS), [])
        if self._at == len(self._window):
            return False
        self._step = self._answer
        return True

    def _answer(self) -> bool:
        self._over = True
        if self._at < len(self._window):
            self._told.append(self._window[self._at :])
            self._at = len(self._window)
        return False
