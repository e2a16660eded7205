"""Raw prompts: text or token ids that the client put together itself, without messages.

A raw prompt has no structure by which an earlier answer could be found in it. So every completion (prompt and answer)
is known by its length and a digest of its whole text or ids. A later prompt is compared by computing the digests of
its own beginnings of the known lengths. Generated text is never tokenised again: the prompt goes on from the recorded
ids.
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
"""The tools hash of a prompt that no template renders."""

_DIGEST_BYTES = 12
# Completions are indexed by their first bytes, so that a prompt is compared only with those that begin alike.
_HEAD = 16
# The head of a completion of which only the digest was stored: every prompt is compared with it.
_UNKNOWN = b""
_MAX_COMPLETIONS = 16_384


class RawPrompt:
    """A prompt as the client sent it, or a completion: the prompt with the answer that the client was shown."""

    def __init__(self, given: str | Sequence[int]) -> None:
        """Raise InvalidRequest for ids that no vocabulary has."""
        self.is_text = isinstance(given, str)
        self.given = given if isinstance(given, str) else _token_ids(given)
        self.data = self.given.encode() if isinstance(self.given, str) else self.given.packed

    @property
    def digest(self) -> bytes:
        """The digest of the whole prompt, which begins with its length in bytes."""
        return next(self.digests([len(self.data)]))

    @property
    def heads(self) -> tuple[bytes, bytes]:
        """The keys of the completions that this prompt may extend: long ones, and ones shorter than a head."""
        kind = b"text" if self.is_text else b"ids"
        return kind + self.data[:_HEAD], kind

    def digests(self, lengths: Iterable[int]) -> Iterator[bytes]:
        """Yield the digests of the beginnings of these ascending lengths, in bytes."""
        hasher = blake2b(digest_size=_DIGEST_BYTES, person=b"text" if self.is_text else b"ids")
        done = 0
        for length in lengths:
            hasher.update(self.data[done:length])
            done = length
            yield length.to_bytes(4) + hasher.digest()

    def extends(self, digest: bytes) -> bool:
        """Return whether this prompt begins with the completion of that digest and is longer."""
        length = length_of(digest)
        return length < len(self.data) and next(self.digests([length])) == digest

    def answered(self, text: str, output_ids: Sequence[int], stop_ids: Sequence[int]) -> RawPrompt:
        """Return the completion: this prompt with its answer. A completion of ids leaves out the end token, which no
        prompt goes on from."""
        if isinstance(self.given, str):
            return RawPrompt(self.given + text)
        ended = bool(output_ids) and output_ids[-1] in stop_ids
        return RawPrompt(self.given + (output_ids[:-1] if ended else output_ids))


class SaidAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as its client received it: the text, and the number of tokens that were generated for it."""

    text: str
    tokens: int


class CompletionIndex:
    """Digests of completions, indexed by their beginnings and bounded in number. It holds nothing about clients, so
    one index serves all."""

    def __init__(self, kept: int = _MAX_COMPLETIONS) -> None:
        self._heads: BoundedCache[bytes, bytes] = BoundedCache(kept, evicted=self._forget)
        self._lengths: dict[bytes, dict[int, int]] = {}

    def keep(self, completion: RawPrompt) -> None:
        """Add a completion."""
        long_head, short_head = completion.heads
        self._keep(completion.digest, long_head if len(completion.data) >= _HEAD else short_head)

    def recall(self, digest: bytes) -> None:
        """Add a completion of which only the digest was stored."""
        self._keep(digest, _UNKNOWN)

    def extended_by(self, prompt: RawPrompt) -> tuple[bytes, ...]:
        """Return the digests of the completions that `prompt` extends, the longest first."""
        lengths = sorted(
            {
                length
                for head in (*prompt.heads, _UNKNOWN)
                for length in list(self._lengths.get(head, ()))  # a copy, because other threads add to it
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
    """Return the length in bytes of the completion with this digest."""
    return int.from_bytes(digest[:4])


def plan_ids(template: ChatTemplate, ids: TokenIds, recent: Sequence[KnownTurn]) -> PromptPlan:
    """Plan a prompt of ids, which are used as they are: a continuation of the turn among `recent` whose ids it begins
    with, or a branch of one. Raise InvalidRequest for an empty prompt and for ids of no token."""
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if max(ids) >= template.vocabulary_size:
        raise InvalidRequest(f"there is no token {max(ids)}", param="prompt")
    plan = branch(ids, recent, Continuation.EDITED)
    parent = next((turn for turn in recent if turn.id == plan.parent_id), None)
    if parent is None:
        return plan
    missing = tuple(parent.path_ids[plan.prefix_tokens :])
    if not missing or (len(missing) == 1 and missing[0] in template.stop_ids):
        return msgspec.structs.replace(plan, continuation=Continuation.EXACT)
    return plan


def plan_text(template: ChatTemplate, text: str, recent: Sequence[KnownTurn]) -> PromptPlan:
    """Plan a prompt of text that extends no known completion. Raise InvalidRequest for an empty prompt and for one
    that is far too long."""
    template.check_length(text)
    ids = TokenIds.of(template.encode_prompt(text))
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return branch(ids, recent, Continuation.EDITED)


def plan_text_behind(
    template: ChatTemplate, decoder: TokenDecoder, parent: KnownTurn, answer: SaidAnswer, rest: str
) -> PromptPlan:
    """Plan a prompt of text that consists of the prompt of `parent`, its answer as the client was shown it, and
    `rest`. The recorded ids are reused, and only `rest` is tokenised.

    An answer may end in tokens that the client was not shown: the end token, or those of a stop string. They are
    reused if `rest` begins with their text; otherwise the prompt goes on before them. Raise ContextLengthExceeded
    for a rest that is far too long.
    """
    template.check_length(rest)
    output = tuple(parent.path_ids[len(parent.path_ids) - answer.tokens :])
    ended = bool(output) and output[-1] in template.stop_ids
    mark = template.token_text(output[-1]) if ended else ""
    if ended and rest.startswith(mark):
        reused, added = len(output), rest[len(mark) :]
    else:
        reused, added = _reusable(decoder, output[: len(output) - ended], answer.text, rest)
    count = len(parent.path_ids) - len(output) + reused
    last = parent.path_ids[count - 1]
    new = template.encode_after(last, added) if last in template.special_ids else template.encode(added)
    return PromptPlan(
        input_ids=parent.path_ids[:count] + new,
        parent_id=parent.id,
        prefix_tokens=count,
        continuation=Continuation.EXACT if reused >= len(output) - ended else Continuation.EDITED,
    )


def _reusable(decoder: TokenDecoder, output: Sequence[int], shown: str, rest: str) -> tuple[int, str]:
    """Return how many tokens of the output the prompt goes on from, and the text that it adds to them."""
    text = decoder.text(output)
    if text.startswith(shown) and rest.startswith(text[len(shown) :]):
        return len(output), rest[len(text) - len(shown) :]
    for count in range(len(output), 0, -1):
        text = decoder.text(output[:count])
        if shown.startswith(text):
            return count, shown[len(text) :] + rest
    return 0, shown + rest


def _token_ids(ids: Sequence[int]) -> TokenIds:
    try:
        packed = TokenIds.of(ids)
    except struct.error as error:
        raise InvalidRequest("the prompt has an id that no token has", param="prompt") from error
    if min(ids, default=0) < 0:
        raise InvalidRequest("the prompt has an id that no token has", param="prompt")
    return packed
