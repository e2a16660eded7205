"""Prompts without messages: text, or token ids, that the client put together itself.

Such a prompt has no structure by which an earlier answer could be found in it. So a completion is known by a digest
of its whole text (or ids) that begins with its length: of a later prompt, the beginnings of the lengths that are
known are compared. Text that was generated is never tokenised again: the prompt goes on from the recorded ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation
from proxy.errors import InvalidRequest
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.prefix import KnownTurn, PromptPlan, branch
from proxy.tokens.template import ChatTemplate

NO_TOOLS = bytes(16)
"""What stands for the tools of a prompt without a template."""

_DIGEST_BYTES = 12
_HEAD = 16
_UNKNOWN = b""
_KEPT = 16_384


class RawPrompt:
    """A prompt as it came, or a completion: the prompt with the answer that was shown."""

    def __init__(self, given: str | Sequence[int]) -> None:
        """Raises InvalidRequest for ids that no vocabulary has."""
        self.is_text = isinstance(given, str)
        self.given = given if isinstance(given, str) else _token_ids(given)
        self.data = self.given.encode() if isinstance(self.given, str) else self.given.packed

    @property
    def digest(self) -> bytes:
        return next(self.digests([len(self.data)]))

    @property
    def heads(self) -> tuple[bytes, bytes]:
        """Under which completions are known that it may extend: long ones, and such as are shorter than a head."""
        kind = b"text" if self.is_text else b"ids"
        return kind + self.data[:_HEAD], kind

    def digests(self, lengths: Iterable[int]) -> Iterator[bytes]:
        """Of its beginnings of these lengths in bytes, which ascend."""
        hasher = blake2b(digest_size=_DIGEST_BYTES, person=b"text" if self.is_text else b"ids")
        done = 0
        for length in lengths:
            hasher.update(self.data[done:length])
            done = length
            yield length.to_bytes(4) + hasher.digest()

    def extends(self, digest: bytes) -> bool:
        """Whether it goes on from the completion of that digest: it begins with it and says more."""
        length = length_of(digest)
        return length < len(self.data) and next(self.digests([length])) == digest

    def answered(self, text: str, output_ids: Sequence[int], stop_ids: Sequence[int]) -> RawPrompt:
        """The completion: what its client has when it was answered. Of ids, without the end mark, which goes on
        nowhere."""
        if isinstance(self.given, str):
            return RawPrompt(self.given + text)
        ended = bool(output_ids) and output_ids[-1] in stop_ids
        return RawPrompt(self.given + (output_ids[:-1] if ended else output_ids))


class SaidAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as its client knows it: the text, and how many tokens were generated for it."""

    text: str
    tokens: int


class CompletionIndex:
    """Digests of completions, by what they begin with: nothing about clients, so that it is one for all. Bounded."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._heads: BoundedCache[bytes, bytes] = BoundedCache(kept, evicted=self._forget)
        self._lengths: dict[bytes, dict[int, int]] = {}

    def keep(self, completion: RawPrompt) -> None:
        long_head, short_head = completion.heads
        self._keep(completion.digest, long_head if len(completion.data) >= _HEAD else short_head)

    def recall(self, digest: bytes) -> None:
        """A completion of which only the digest was kept."""
        self._keep(digest, _UNKNOWN)

    def extended_by(self, prompt: RawPrompt) -> tuple[bytes, ...]:
        """The completions that `prompt` extends, the longest first."""
        lengths = sorted(
            {
                length
                for head in (*prompt.heads, _UNKNOWN)
                for length in list(self._lengths.get(head, ()))  # a copy: other threads add to it
                if length < len(prompt.data)
            }
        )
        found = [digest for digest in prompt.digests(lengths) if digest in self._heads]
        return tuple(reversed(found))

    def _keep(self, digest: bytes, head: bytes) -> None:
        if self._heads.get(digest) is not None:
            return
        counts = self._lengths.setdefault(head, {})
        counts[length_of(digest)] = counts.get(length_of(digest), 0) + 1
        self._heads.put(digest, head)

    def _forget(self, digest: bytes, head: bytes) -> None:
        counts = self._lengths[head]
        counts[length_of(digest)] -= 1
        if not counts[length_of(digest)]:
            del counts[length_of(digest)]
        if not counts:
            del self._lengths[head]


def length_of(digest: bytes) -> int:
    """In bytes, of the completion of that digest."""
    return int.from_bytes(digest[:4])


def plan_ids(template: ChatTemplate, ids: TokenIds, recent: Sequence[KnownTurn]) -> PromptPlan:
    """A prompt of ids, which are taken as they are: a continuation of the one among `recent` whose ids it begins
    with, or a branch of it. Raises InvalidRequest for an empty prompt, and for ids of no token."""
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if max(ids) >= template.vocabulary_size:
        raise InvalidRequest(f"there is no token {max(ids)}", param="prompt")
    plan = branch(ids, recent, Continuation.EDITED)
    parent = next((turn for turn in recent if turn.id == plan.parent_id), None)
    if parent is None:
        return plan
    unsaid = tuple(parent.path_ids[plan.prefix_tokens :])
    if not unsaid or (len(unsaid) == 1 and unsaid[0] in template.stop_ids):
        return msgspec.structs.replace(plan, continuation=Continuation.EXACT)
    return plan


def plan_text(template: ChatTemplate, text: str, recent: Sequence[KnownTurn]) -> PromptPlan:
    """A prompt of text that extends no known completion. Raises InvalidRequest for an empty one, and for one that is
    far too long."""
    template.check_length(text)
    ids = TokenIds.of(template.encode_prompt(text))
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return branch(ids, recent, Continuation.EDITED)


def plan_text_behind(
    template: ChatTemplate, decoder: TokenDecoder, parent: KnownTurn, answer: SaidAnswer, rest: str
) -> PromptPlan:
    """A prompt of text that is what `parent` was asked, its answer as it was shown, and `rest`: its ids, and those of
    the rest.

    What of the answer was not shown to the client stays where the client wrote it itself: the end mark, or a stop
    string. Otherwise the prompt goes on before it. Raises ContextLengthExceeded for a rest that is far too long.
    """
    template.check_length(rest)
    output = tuple(parent.path_ids[len(parent.path_ids) - answer.tokens :])
    ended = bool(output) and output[-1] in template.stop_ids
    mark = template.token_text(output[-1]) if ended else ""
    if ended and rest.startswith(mark):
        kept, behind = len(output), rest[len(mark) :]
    else:
        kept, behind = _kept(decoder, output[: len(output) - ended], answer.text, rest)
    count = len(parent.path_ids) - len(output) + kept
    last = parent.path_ids[count - 1]
    new = template.encode_after(last, behind) if last in template.special_ids else template.encode(behind)
    return PromptPlan(
        input_ids=parent.path_ids[:count] + new,
        parent_id=parent.id,
        prefix_tokens=count,
        continuation=Continuation.EXACT if kept >= len(output) - ended else Continuation.EDITED,
    )


def _kept(decoder: TokenDecoder, output: Sequence[int], said: str, rest: str) -> tuple[int, str]:
    """How many tokens of the output the prompt goes on from, and what it says behind them."""
    text = decoder.text(output)
    if text.startswith(said) and rest.startswith(text[len(said) :]):
        return len(output), rest[len(text) - len(said) :]
    for count in range(len(output), 0, -1):
        text = decoder.text(output[:count])
        if said.startswith(text):
            return count, said[len(text) :] + rest
    return 0, said + rest


def _token_ids(ids: Sequence[int]) -> TokenIds:
    try:
        packed = TokenIds.of(ids)
    except struct.error as error:
        raise InvalidRequest("there is no such token", param="prompt") from error
    if min(ids, default=0) < 0:
        raise InvalidRequest("there is no such token", param="prompt")
    return packed
