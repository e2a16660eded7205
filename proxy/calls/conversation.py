"""Read a request's conversation in the time that its new messages take.

Clients send the whole conversation with every call, and write earlier messages in the same bytes as before. So in a
request that continues an earlier one, the messages up to the last answer are recognised by a digest of their bytes;
only that answer and the messages after it are decoded, checked and hashed.
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
"""Decode and check the message at a position. Raise InvalidRequest."""

# An entry takes about 300 bytes.
_MOST_CONVERSATIONS = 1 << 16
# Messages at the end among which the last answer is searched. Without one there, the whole conversation is read.
_LOOK_BACK = 64


# The newest turns of ours that a conversation names are remembered, this many. One query reads them; the newest
# decides, and older ones matter only if it is unknown here.
_MOST_NAMED = 8

_FLOATING = frozenset({"system", "developer", "user"})
_ANSWERED = frozenset({"user", "tool", "function"})
_SYSTEM = frozenset({"system", "developer"})
_TEXT_PARTS = frozenset({"text", "input_text"})


class WireMessages(Sequence[Message]):
    """The messages of a body; each is decoded and checked when it is first used."""

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
        # Every step of a call reads messages, so reading a known one calls no function.
        known = self._known
        if type(index) is int and index in known:
            return known[index]
        positions = range(len(self._raws))
        if isinstance(index, slice):
            return [known[position] if position in known else self[position] for position in positions[index]]
        position = positions[index]
        if position not in known:
            known[position] = self._read(self._raws[position], position)
        return known[position]

    def digests(self, split: int) -> tuple[bytes, bytes]:
        """Return the SHA-256 of the bytes of the first `split` messages, and of all messages.

        Processors have instructions for this hash.
        """
        hasher = sha256(b",".join(self._raws[:split]))
        first = hasher.digest()
        hasher.update((b"," if split else b"") + b",".join(self._raws[split:]))
        return first, hasher.digest()


class KnownMessages(msgspec.Struct, frozen=True):
    """The beginning of a conversation: its canonical hash, whether all messages are plain, and the turns of ours that
    they name by id, newest first."""

    hash: bytes = EMPTY
    plain: bool = True
    named: tuple[TurnId, ...] = ()

    def followed_by(self, messages: Iterable[Message]) -> KnownMessages:
        """Return the knowledge about these messages with more messages after them."""
        current, plain, named = self.hash, self.plain, self.named
        for message in messages:
            current = extend_hash(current, message)
            plain = plain and _is_plain(message)
            named = _naming(named, message)
        return KnownMessages(current, plain, named)


class RememberedMessages(list[Message]):
    """A conversation that was read before: its first `start` messages are `known`."""

    def __init__(self, messages: Iterable[Message], *, start: int, known: KnownMessages) -> None:
        super().__init__(messages)
        self.start = start
        self.known = known


class ReadConversation:
    """The messages of one request with the chain of their hashes, which is computed as far as it is used.

    `digest` is the SHA-256 of their bytes, None where the bytes are not at hand. `plain`: no message holds reasoning,
    which templates write differently in earlier turns.
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
        # At once and not on demand: every call needs the hashes of its new messages to find its session.
        current, plain, named = known.hash, known.plain, known.named
        self._new = messages[start:]
        """The messages after the known ones, read."""
        for position, message in enumerate(self._new, start):
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
        """The hash of the conversation without the reminder at its end; None if it ends with none.

        Agents append a reminder to the conversation and leave it out of the next request. It is the last message, if
        the message before also asks for an answer, or the end of the last user message (`without_reminder`).
        """
        if not self._new or self._new[-1]["role"] not in _FLOATING:
            return None
        if len(self._new) > 1 and self._new[-2]["role"] in _ANSWERED:
            return self._tail[-2]
        text = without_reminder(self._new[-1])
        if text is None:
            return None
        before = self._tail[-2] if len(self._tail) > 1 else self._known.hash
        return extend_hash(before, {**self._new[-1], "content": text})

    @property
    def lone_message(self) -> tuple[bytes, str] | None:
        """The hash of the system messages and the text of the only message after them; None unless it is a user's."""
        if self._start or not self._new or self._new[-1]["role"] != "user":
            return None
        content = self._new[-1].get("content")
        if isinstance(content, list) and any(part.get("type") not in _TEXT_PARTS for part in content):
            return None
        if any(message["role"] not in _SYSTEM for message in self._new[:-1]):
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
        """The hash of the conversation up to and with its last answer; None in a conversation without one."""
        if self._last_answered is None and self._start:
            self._last_answered = next(self.walk_answered(), None)
        return self._last_answered

    def prepare(self) -> None:
        """Find the last answer now, on the caller's thread, as it may take hashing the whole conversation."""
        self._last_answered = self.last_answered

    def walk_answered(self) -> Iterator[bytes]:
        """Yield the hash of the conversation up to and with each answer, the last answer first."""
        for message, digest in zip(reversed(self._new), reversed(self._tail), strict=True):
            if message["role"] == "assistant":
                yield digest
        if self._start:
            whole = self._whole()
            for position in range(self._start - 1, -1, -1):
                if self.messages[position]["role"] == "assistant":
                    yield whole[position]

    @property
    def textless_answer(self) -> TurnId | None:
        """The turn whose answer is the last one here, if it came back with tool calls but without text.

        Several clients cannot send text beside tool calls and drop it.
        """
        if self._last_answer is None:
            return None
        answer = self.messages[self._last_answer]
        if not answer.get("tool_calls") or text_of(answer.get("content")).strip():
            return None
        return next(iter(_naming((), answer)), None)

    def restore(self, text: str) -> bytes:
        """Return the hash up to the last answer as if the answer had `text`, and add this hash to the chain."""
        assert self._last_answer is not None, "there is a textless answer"
        tail = self._last_answer - self._start
        before = self._tail[tail - 1] if tail else self._known.hash
        digest = extend_hash(before, {**self.messages[self._last_answer], "content": text})
        self._restored[digest] = self._last_answer + 1
        return digest

    def holds(self, digest: bytes) -> bool:
        """Return whether the chain holds this hash."""
        return (
            digest in self._tail or digest == self._known.hash or digest in self._restored or digest in self._whole()
        )

    def length_at(self, digest: bytes) -> int:
        """Return the number of messages that this hash covers. Raise ValueError if it is not in the chain."""
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
    """The hashes of a conversation up to each of its answers, the last answer first; a recorded turn may have each.

    The first hash is at hand. Hashes of the recognised messages are computed when they are first used.
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
    """Canonical hashes of conversations by the digest of their bytes. Bounded; a forgotten entry is computed again.

    It holds nothing about clients, so all of them share it. Threads may share it.
    """

    def __init__(self, most: int = _MOST_CONVERSATIONS) -> None:
        self._lock = threading.Lock()  # another thread may drop an entry between finding it and marking it as used
        self._known: BoundedCache[bytes, KnownMessages] = BoundedCache(most)

    def read(self, messages: Sequence[Message]) -> ReadConversation:
        """Read a conversation, and check the messages whose bytes are not known. Raise InvalidRequest."""
        if isinstance(messages, RememberedMessages):
            return ReadConversation(messages, start=messages.start, known=messages.known, digest=None)
        if not isinstance(messages, WireMessages):
            return ReadConversation(messages, start=0, known=KnownMessages(), digest=None)
        # The last answer is where the earlier request and its answer met: the messages before it were sent before.
        split = _last_answer(messages)
        before, whole = messages.digests(split)
        known = self._find(before) if split else None
        if known is None:
            return ReadConversation(messages, start=0, known=KnownMessages(), digest=whole)
        return ReadConversation(messages, start=split, known=known, digest=whole)

    def keep(self, conversation: ReadConversation) -> None:
        """Remember the conversation, so that a request that continues it is recognised."""
        if conversation.digest is None:
            return
        with self._lock:
            known = KnownMessages(conversation.hash, conversation.plain, conversation.named)
            self._known.put(conversation.digest, known)

    def _find(self, digest: bytes) -> KnownMessages | None:
        with self._lock:
            return self._known.get(digest)


def _last_answer(messages: Sequence[Message]) -> int:
    """Return the position of the last message of the assistant; 0 if there is none near the end."""
    count = len(messages)
    for position in range(count - 1, max(-1, count - _LOOK_BACK), -1):
        if messages[position]["role"] == "assistant":
            return position
    return 0


def _naming(named: tuple[TurnId, ...], message: Message) -> tuple[TurnId, ...]:
    """Return the turns that the conversation names with this message at its end, newest first."""
    if message["role"] == "assistant":
        ids = [message.get("id"), *(call.get("id") for call in message.get("tool_calls") or ())]
    elif message["role"] == "tool":
        ids = [message.get("tool_call_id")]
    else:
        return named
    for identifier in ids:
        turn = turn_of_part(identifier)
        if turn is not None and turn not in named[:1]:
            named = (turn, *(other for other in named if other != turn))[:_MOST_NAMED]
    return named


def without_reminder(message: Message) -> str | None:
    """Return the text of a user's message without the reminder at its end; None if it has no reminder.

    Agents append reminders to their last message, as a part of its content or between tags.
    """
    content = message.get("content")
    if message["role"] != "user":
        return None
    if isinstance(content, list):
        return text_of(content[:-1]) or None
    text = text_of(content).rstrip()
    # By hand and not by a regular expression, which would backtrack on long texts.
    opening = text.rfind("</")
    if opening < 0 or not text.endswith(">"):
        return None
    begin = text.rfind(f"<{text[opening + 2 : -1]}>", 0, opening)
    return text[: max(begin, 0)].rstrip() or None


def _is_plain(message: Message) -> bool:
    return not message.get("reasoning_content") and "</think>" not in text_of(message.get("content"))
