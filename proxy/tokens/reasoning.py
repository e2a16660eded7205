"""Reasoning in a model's output: `<think>…</think>` before the answer.

Some templates open the thought in the prompt already; then the output begins inside of it, and an opening tag that
the model writes nevertheless is dropped. A closing tag without an opening one is text: what stood before it has
already been emitted as the answer. White space around a thought is layout.
"""

from __future__ import annotations

import re

import msgspec

from proxy.tokens.scanning import Scanner

OPEN = "<think>"
CLOSE = "</think>"
_LINE_BREAKS = re.compile(r"[\r\n]*")


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends inside of a thought. Its last characters are enough."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningParser(Scanner):
    """Separates the thought from one answer.

    Tool calls in a thought are part of it. A thought that is never closed is the whole answer: nothing becomes answer
    text that the model did not write as such.
    """

    def __init__(self, *, in_reasoning: bool) -> None:
        super().__init__()
        self._space: list[str] = []
        self._events: list[str | Reasoning] = []
        self.thinking = in_reasoning
        """Whether the next text belongs to a thought."""
        self.over = False
        """Whether all further text is the answer. Nothing is held back then."""
        self._step = self._beginning

    def feed(self, text: str) -> list[str | Reasoning]:
        """Return the reasoning and the answer text that `text` completes."""
        self._scan(text)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[str | Reasoning]:
        """Return the text that was held back, once the answer is over. White space at a thought's end is dropped."""
        rest = "".join([*self._space, self._window[self._at :]])
        self._space, self._window, self._at = [], "", 0
        if self.thinking:
            return [Reasoning(rest)] if rest.strip() else []
        return [rest] if rest else []

    def _beginning(self) -> bool:
        self._consume_space(self._space)
        found = self._next((OPEN,))
        if found is None:
            return False
        self._at += len(found)
        self.thinking = self.thinking or bool(found)
        if self.thinking:
            self._space, self._step = [], self._thought_beginning
        else:
            self._events += self._space
            self._space, self._step = [], self._answer
        return True

    def _thought_beginning(self) -> bool:
        self._consume_space([])
        if self._at == len(self._window):
            return False
        self._step = self._thought
        return True

    def _thought(self) -> bool:
        """Emit the thought, without white space that may turn out to be its end."""
        pieces: list[str] = []
        ended = self._consume_until(CLOSE, pieces)
        text = "".join(pieces)
        stripped = text.rstrip()
        if stripped:
            self._events.append(Reasoning("".join([*self._space, stripped])))
            self._space = []
        self._space.append(text[len(stripped) :])
        if ended:
            self._at += len(CLOSE)
            self.thinking, self._space, self._step = False, [], self._answer_beginning
        return ended

    def _answer_beginning(self) -> bool:
        self._consume(self._match(_LINE_BREAKS), [])
        if self._at == len(self._window):
            return False
        self._step = self._answer
        return True

    def _answer(self) -> bool:
        self.over = True
        if self._at < len(self._window):
            self._events.append(self._window[self._at :])
            self._at = len(self._window)
        return False
