"""A request's conversation at the cost of what is new in it.

Clients send the whole conversation with every call, and write what they sent before in the same bytes. So of a
request that goes on from an earlier one, the messages up to the last answer are recognised by a digest of their
bytes; only that answer and what follows are decoded, checked and hashed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, overload

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.contract.identifiers import TurnId, turn_of_part
from proxy.tokens.canonical import EMPTY, extend_hash, text_of

Message = dict[str, Any]
ReadMessage = Callable[[msgspec.Raw, int], Message]
"""Decodes and checks the message of that number. Raises InvalidRequest."""

_KEPT = 1 << 16
_LOOK_BACK = 64
"""How many messages behind the last answer are looked at before the conversation is read from its beginning."""


_NAMED = 8
"""How many of our turns a conversation is known to name, the newest: one query looks them up, and the newest decides
unless it is unknown here."""

_FLOATING = frozenset({"system", "developer", "user"})
_ANSWERED = frozenset({"user", "tool", "function"})
_SYSTEM = frozenset({"system", "developer"})
_TEXT_PARTS = frozenset({"text", "input_text"})


class WireMessages(Sequence[Message]):
    """The messages of a body, each read when it is first looked at."""

    def __init__(self, raws: Sequence[msgspec.Raw], read: ReadMessage) -> None:
        self._raws = raws
        self._read = read
        self._known: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self._raws)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self._raws)))]
        return self._at(index if index >= 0 else range(len(self._raws))[index])

    def _at(self, position: int) -> Message:
        message = self._known.get(position)
        if message is None:
            message = self._known[position] = self._read(self._raws[position], position)
        return message

    def digests(self, split: int) -> tuple[bytes, bytes]:
        """Return the SHA-256 of the bytes of the first `split` messages, and of all messages.

        Processors have instructions for this hash.
        """
        hasher = sha256(b",".join(self._raws[:split]))
        first = hasher.digest()
        hasher.update(b"," + b",".join(self._raws[split:]))
        return first, hasher.digest()


class KnownMessages(msgspec.Struct, frozen=True):
    """The canonical hash of some messages, whether all of them are plain, and the turns of ours whose ids they hold,
    newest first."""

    hash: bytes = EMPTY
    plain: bool = True
    named: tuple[TurnId, ...] = ()

    def followed_by(self, messages: Iterable[Message]) -> KnownMessages:
        """Return what is known of these messages with more behind them."""
        current, plain, named = self.hash, self.plain, self.named
        for message in messages:
            current = extend_hash(current, message)
            plain = plain and _is_plain(message)
            named = _naming(named, message)
        return KnownMessages(current, plain, named)


class RememberedMessages(list[Message]):
    """Messages of which the first `start` are `known`."""

    def __init__(self, messages: Iterable[Message], *, start: int, known: KnownMessages) -> None:
        super().__init__(messages)
        self.start = start
        self.known = known


class ReadConversation:
    """The messages of one request with their hash chain, which is made as far as somebody asks for it.

    `digest` is that of its bytes, None where they are not at hand. `plain`: no message holds reasoning, which
    templates write differently once it is past.
    """

    def __init__(
        self, messages: Sequence[Message], *, start: int, known: KnownMessages, digest: bytes | None
    ) -> None:
        self.messages = messages
        self._start = start
        self._known = known
        self.digest = digest
        self._tail: list[bytes] = []
        self._all: list[bytes] | None = None
        self._last_answered: bytes | None = None
        self._last_answer: int | None = None
        self._restored: dict[bytes, int] = {}
        current, plain, named = known.hash, known.plain, known.named
        for position, message in enumerate(messages[start:], start):
            current = extend_hash(current, message)
            plain = plain and _is_plain(message)
            named = _naming(named, message)
            self._tail.append(current)
            if message["role"] == "assistant":
                self._last_answered, self._last_answer = current, position
        self.plain = plain
        self.named = named

    @property
    def settled_hash(self) -> bytes | None:
        """The hash of the conversation without a reminder that ends it; None if there is none.

        Agents leave reminders out of the next request. One is the last message, if what stands before it is to be
        answered as well, or the end of the last user message (`without_reminder`).
        """
        if not self._tail or self.messages[-1]["role"] not in _FLOATING:
            return None
        if len(self._tail) > 1 and self.messages[-2]["role"] in _ANSWERED:
            return self._tail[-2]
        text = without_reminder(self.messages[-1])
        if text is None:
            return None
        before = self._tail[-2] if len(self._tail) > 1 else self._known.hash
        return extend_hash(before, {**self.messages[-1], "content": text})

    @property
    def lone_message(self) -> tuple[bytes, str] | None:
        """The hash of the system messages and the text behind them, if one user message of text is all the rest."""
        if self._start or not self.messages or self.messages[-1]["role"] != "user":
            return None
        content = self.messages[-1].get("content")
        if isinstance(content, list) and any(part.get("type") not in _TEXT_PARTS for part in content):
            return None
        if not all(self.messages[position]["role"] in _SYSTEM for position in range(len(self.messages) - 1)):
            return None
        return (self._tail[-2] if len(self._tail) > 1 else self._known.hash), text_of(content)

    @property
    def hash(self) -> bytes:
        """The hash of the whole conversation."""
        return self._tail[-1] if self._tail else self._known.hash

    @property
    def answered(self) -> AnsweredHashes:
        return AnsweredHashes(self)

    @property
    def last_answered(self) -> bytes | None:
        """The hash behind the last answer; None in a conversation without one."""
        if self._last_answered is None and self._start:
            self._last_answered = next(self.walk_answered(), None)
        return self._last_answered

    def prepare(self) -> None:
        """Find the last answer now, which may mean to hash the conversation from its beginning: on the thread of the
        caller, not where the answer is asked for."""
        self._last_answered = self.last_answered

    def walk_answered(self) -> Iterator[bytes]:
        for position in range(len(self.messages) - 1, self._start - 1, -1):
            if self.messages[position]["role"] == "assistant":
                yield self._tail[position - self._start]
        if self._start:
            whole = self._whole()
            for position in range(self._start - 1, -1, -1):
                if self.messages[position]["role"] == "assistant":
                    yield whole[position]

    @property
    def textless_answer(self) -> TurnId | None:
        """The turn whose answer is the last one here, where that came back with its tool calls and without text.

        Several clients cannot send text beside tool calls, and drop it.
        """
        if self._last_answer is None:
            return None
        answer = self.messages[self._last_answer]
        if not answer.get("tool_calls") or text_of(answer.get("content")).strip():
            return None
        return next(iter(_naming((), answer)), None)

    def restore(self, text: str) -> bytes:
        """Return the hash behind the last answer as it would be with `text`; from now on the chain holds it too."""
        assert self._last_answer is not None, "there is a textless answer"
        tail = self._last_answer - self._start
        before = self._tail[tail - 1] if tail else self._known.hash
        digest = extend_hash(before, {**self.messages[self._last_answer], "content": text})
        self._restored[digest] = self._last_answer + 1
        return digest

    def holds(self, digest: bytes) -> bool:
        """Return whether that hash is in the chain."""
        return (
            digest in self._tail or digest == self._known.hash or digest in self._restored or digest in self._whole()
        )

    def length_at(self, digest: bytes) -> int:
        """Return how many messages that hash is over. Raises ValueError for one that is not in the chain."""
        if digest in self._restored:
            return self._restored[digest]
        if digest in self._tail:
            return self._start + self._tail.index(digest) + 1
        if digest == self._known.hash:
            return self._start
        return self._whole().index(digest) + 1

    def _whole(self) -> list[bytes]:
        if self._all is None:
            current, self._all = EMPTY, []
            for message in self.messages:
                current = extend_hash(current, message)
                self._all.append(current)
        return self._all


class AnsweredHashes(Sequence[bytes]):
    """The hashes behind every answer in a conversation, longest conversation first: where a recorded turn may have
    ended.

    The first costs nothing; what lies before the recognised messages is read when it is asked for.
    """

    def __init__(self, conversation: ReadConversation) -> None:
        self._conversation = conversation
        self._whole: tuple[bytes, ...] | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self._conversation.walk_answered()

    def __bool__(self) -> bool:
        return self._conversation.last_answered is not None

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...

    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        if index == 0:
            first = self._conversation.last_answered
            if first is not None:
                return first
        return self._all()[index]

    def _all(self) -> tuple[bytes, ...]:
        if self._whole is None:
            self._whole = tuple(self._conversation.walk_answered())
        return self._whole


class ConversationIndex:
    """Which bytes have which canonical hash: nothing about clients, so that it is one for all. Bounded; what is
    forgotten is computed again. Threads may share it."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock = threading.Lock()  # an entry that is found may be dropped before it is counted as used
        self._known: BoundedCache[bytes, KnownMessages] = BoundedCache(kept)

    def read(self, messages: Sequence[Message]) -> ReadConversation:
        """Check every message that was not checked before in these very bytes. Raises InvalidRequest."""
        if isinstance(messages, RememberedMessages):
            return ReadConversation(messages, start=messages.start, known=messages.known, digest=None)
        if not isinstance(messages, WireMessages):
            return ReadConversation(messages, start=0, known=KnownMessages(), digest=None)
        split = _last_answer(messages)
        before, whole = messages.digests(split)
        known = self._find(before) if split else None
        if known is None:
            return ReadConversation(messages, start=0, known=KnownMessages(), digest=whole)
        return ReadConversation(messages, start=split, known=known, digest=whole)

    def keep(self, conversation: ReadConversation) -> None:
        """Remember the conversation, so that the request which goes on from it is recognised."""
        if conversation.digest is None:
            return
        with self._lock:
            known = KnownMessages(conversation.hash, conversation.plain, conversation.named)
            self._known.put(conversation.digest, known)

    def _find(self, digest: bytes) -> KnownMessages | None:
        with self._lock:
            return self._known.get(digest)


def _last_answer(messages: Sequence[Message]) -> int:
    """Return the position of the last message of the assistant; 0 where there is none near the end."""
    for position in range(len(messages) - 1, max(-1, len(messages) - _LOOK_BACK), -1):
        if messages[position]["role"] == "assistant":
            return position
    return 0


def _naming(named: tuple[TurnId, ...], message: Message) -> tuple[TurnId, ...]:
    """Return the turns that are named with this message behind the others, newest first."""
    if message["role"] == "assistant":
        ids = [message.get("id"), *(call.get("id") for call in message.get("tool_calls") or ())]
    elif message["role"] == "tool":
        ids = [message.get("tool_call_id")]
    else:
        return named
    for identifier in ids:
        turn = turn_of_part(identifier)
        if turn is not None and turn not in named[:1]:
            named = (turn, *(other for other in named if other != turn))[:_NAMED]
    return named


def without_reminder(message: Message) -> str | None:
    """Return the text of a user's message without the reminder at its end; None if it has none.

    Agents add one to the message that they send last, as a part of its own or between tags.
    """
    content = message.get("content")
    if message["role"] != "user":
        return None
    if isinstance(content, list):
        return text_of(content[:-1]) or None
    text = text_of(content).rstrip()
    opening = text.rfind("</")
    if opening < 0 or not text.endswith(">"):
        return None
    begin = text.rfind(f"<{text[opening + 2 : -1]}>", 0, opening)
    return text[: max(begin, 0)].rstrip() or None


def _is_plain(message: Message) -> bool:
    return not message.get("reasoning_content") and "</think>" not in text_of(message.get("content"))
