"""Rendering the end of a conversation without its beginning.

Most chat templates write a message the same way whatever stands before the last answer. For those, the messages that
a request adds to a recorded turn are rendered behind a short stand-in for the history, so that the cost of a turn is
the cost of its new messages. This is never assumed of a template: it is proved on conversations of many shapes before
the first use, and the short rendering is compared with the full one whenever a conversation has doubled in length.
Short conversations, which are many, are compared by sampling.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.errors import InvalidRequest
from proxy.log import logger
from proxy.tokens.messages import Message
from proxy.tokens.template import ChatTemplate
from proxy.tokens.thoughts import has_stand_in, with_thoughts

_STAND_IN = {"role": "user", "content": "…"}
_SYSTEM_STAND_IN = {"role": "system", "content": "…"}
# A stand-in for the text of the answer that is continued.
_ANSWER_STAND_IN = "\u2402answer\u2403"
_MAX_PROOFS = 64
# Messages in a short conversation. Of each length of these, the first `_COMPARED` are compared, then every
# `_COMPARED`th.
_SHORT = 16
_COMPARED = 16

_LOG = logger(__name__)


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a template other than messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = {}


Behind = Callable[[ChatTemplate, Sequence[Message], Rendering, int], str | None]
"""Returns the text behind the answer that is the last of the covered messages, or None if the template changes the
text before it (`prefix.behind`)."""


def shortened(messages: Sequence[Message], covered: int) -> tuple[list[Message], int]:
    """Return the messages from the last covered answer on, behind a stand-in for the earlier ones, and how many of
    the returned messages are covered."""
    head: list[Message] = [_SYSTEM_STAND_IN, _STAND_IN] if messages[0]["role"] == "system" else [_STAND_IN]
    return [*head, *messages[covered - 1 :]], len(head) + 1


class Shortcuts:
    """Renders the text behind an answer from a shortened conversation, where one template is proved to allow that.

    Threads may share an instance. Two of them may prove the same thing at one time, or make one comparison more.
    """

    def __init__(self, template: ChatTemplate, behind: Behind) -> None:
        self._template = template
        self._behind = behind
        self._lock = threading.Lock()  # a proof that is found may be evicted before it is counted as used
        self._proofs: BoundedCache[bytes, bool] = BoundedCache(_MAX_PROOFS)
        self._seen: Counter[int] = Counter()

    def _remember(self, key: bytes, proved: bool) -> None:
        with self._lock:
            self._proofs.put(key, proved)

    def behind(self, messages: Sequence[Message], rendering: Rendering, covered: int) -> str | None:
        """Return the text behind the answer, rendered from the shortened conversation; None if that is not proved to
        be right."""
        thoughtful = has_stand_in(messages[covered - 1])
        key = _key(rendering, thoughtful=thoughtful)
        with self._lock:
            proved = self._proofs.get(key)
        if proved is None:
            proved = self._prove(rendering, thoughtful=thoughtful)
            self._remember(key, proved)
        if not proved:
            return None
        try:
            text = self._render_shortened(messages, rendering, covered)
        except InvalidRequest:  # the template may refuse the stand-in only: the full rendering decides
            return None
        if self._is_compared(covered) and text != self._behind(self._template, messages, rendering, covered):
            _LOG.warning("the chat template depends on earlier messages: conversations are rendered whole")
            self._remember(key, False)
            return None
        return text

    def _prove(self, rendering: Rendering, *, thoughtful: bool) -> bool:
        if not thoughtful:
            return all(self._agrees(messages, rendering, covered) for messages, covered in _trials())
        return all(
            self._agrees(with_thoughts(self._template, messages, covered), rendering, covered, may_strip=True)
            for messages, covered in _trials()
        )

    def _agrees(
        self, messages: Sequence[Message], rendering: Rendering, covered: int, *, may_strip: bool = False
    ) -> bool:
        """Return whether both renderings agree. A conversation that the template refuses proves nothing and counts as
        agreement. With `may_strip` they may also agree that the template changes earlier text."""
        try:
            whole = self._behind(self._template, messages, rendering, covered)
        except InvalidRequest:
            return True
        try:
            short = self._render_shortened(messages, rendering, covered)
            return whole == short and (may_strip or whole is not None)
        except InvalidRequest:
            return False

    def _render_shortened(self, messages: Sequence[Message], rendering: Rendering, covered: int) -> str | None:
        # An answer of text alone becomes a stand-in too: the text behind it can then be cut from a single rendering.
        short, short_covered = shortened(messages, covered)
        answer = messages[covered - 1]
        if answer.get("tool_calls") or has_stand_in(answer) or not answer["content"].strip():
            return self._behind(self._template, short, rendering, short_covered)
        short[short_covered - 1] = {**answer, "content": _ANSWER_STAND_IN}
        rendered = self._template.render(
            short, rendering.tools, generation_prompt=True, arguments=rendering.arguments
        )
        _, found, rest = rendered.partition(_ANSWER_STAND_IN)
        return rest if found and rest.startswith(self._template.closing) else None

    def _is_compared(self, covered: int) -> bool:
        if covered > _SHORT or not _doubled(covered):
            return _doubled(covered)
        self._seen[covered] += 1
        return self._seen[covered] <= _COMPARED or self._seen[covered] % _COMPARED == 0


def _doubled(covered: int) -> bool:
    """Return whether `covered` is a power of two or one more: turns come in pairs of messages, so one of the two is
    reached."""
    return covered & (covered - 1) == 0 or (covered - 1) & (covered - 2) == 0


def _key(rendering: Rendering, *, thoughtful: bool) -> bytes:
    """Return the key of a proof. Templates may branch on whether there are tools or thoughts, and on any argument."""
    return msgspec.json.encode([bool(rendering.tools), thoughtful, rendering.arguments], order="deterministic")


def _trials() -> list[tuple[list[Message], int]]:
    """Return conversations of the shapes that agents have, each with the number of messages that a recorded turn
    covers."""
    system: Message = {"role": "system", "content": "Be brief."}
    asked: Message = {"role": "user", "content": "What is it?"}
    more: Message = {"role": "user", "content": "And then?"}
    said: Message = {"role": "assistant", "content": "It is this."}
    called = _called("It needs a tool.", "look")
    twice = _called("", "look", "listen")
    seen: Message = {"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "a tree"}
    heard: Message = {"role": "tool", "tool_call_id": "call00001", "name": "listen", "content": "wind"}
    trials: list[tuple[list[Message], int]] = []
    for opening in ([asked], [system, asked]):
        chat = [*opening, said, more, said, more, said]
        loop = [*opening, called, seen, said, more, called, seen]
        trials += [
            ([*opening, said, more], len(opening) + 1),
            ([*chat, more], len(chat)),
            ([*chat, more, asked], len(chat)),
            ([*opening, called, seen], len(opening) + 1),
            ([*loop, said, more], len(loop) + 1),
            ([*loop, called, seen], len(loop) + 1),
            ([*loop, twice, seen, heard], len(loop) + 1),
            ([*loop, twice, seen, heard, more], len(loop) + 1),
        ]
    return trials


def _called(text: str, *names: str) -> Message:
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": '{"at": "the tree"}'}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}
