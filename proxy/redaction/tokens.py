"""Token ids without what the rules find in their text. Pure.

A placeholder stands where a token was, so that positions stay. A found place is looked for across the boundary to the
tokens before as well, of which a window is read: what begins in an earlier turn and ends in this one is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from proxy.redaction.text import TextRedactor

WINDOW = 256
"""Tokens before a turn's own that are read with them. What is longer than this is found in its parts alone."""
_ROUNDS = 4
_BETWEEN = "\n"
"""Special tokens end one text and begin another."""


class Detokenizer(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Decoder(Protocol):
    """As `tokens.detokenizer.TokenDecoder`: `hidden` tokens, the special ones, give no text."""

    def start(self) -> Detokenizer: ...

    def is_hidden(self, token: int) -> bool: ...


Spans = tuple[tuple[int, int], ...]


def masked_tokens(
    before: Sequence[int], own: Sequence[int], redactor: TextRedactor, decoder: Decoder, placeholder: int
) -> tuple[tuple[int, ...], Spans]:
    """`own` with placeholders, and where they stand. `before` are tokens that come before them on the path."""
    context = tuple(before[-WINDOW:])
    contexts = {context, _replaced(context, redactor, decoder, placeholder)}  # as it was, and as it is stored
    ids, masked = list(own), set[int]()
    for _ in range(_ROUNDS):
        new = {position for each in contexts for position in _found(each, ids, redactor, decoder)} - masked
        if not new:
            return tuple(ids), _spans(masked)
        masked |= new
        for position in new:
            ids[position] = placeholder
    return (placeholder,) * len(ids), ((0, len(ids)),)


def _replaced(ids: tuple[int, ...], redactor: TextRedactor, decoder: Decoder, placeholder: int) -> tuple[int, ...]:
    found = _found((), ids, redactor, decoder)
    return tuple(placeholder if position in found else token for position, token in enumerate(ids))


def _found(context: Sequence[int], own: Sequence[int], redactor: TextRedactor, decoder: Decoder) -> set[int]:
    """Positions in `own` of tokens whose text, or a part of it, is found."""
    ids = (*context, *own)
    ends, text = _ends(ids, decoder)
    found = redactor.found(text)
    hits: set[int] = set()
    position = len(context)
    for one in found:
        while position < len(ids) and ends[position] <= one.start:
            position += 1
        at = position
        while at < len(ids) and (ends[at - 1] if at else 0) < one.end:
            if not decoder.is_hidden(ids[at]):
                hits.add(at - len(context))
            at += 1
        first = position - 1  # bytes of a character that only a later token completes
        while first >= len(context) and at > position and _says_nothing(first, ids, ends, decoder):
            hits.add(first - len(context))
            first -= 1
    return hits


def _says_nothing(at: int, ids: Sequence[int], ends: Sequence[int], decoder: Decoder) -> bool:
    return ends[at] == (ends[at - 1] if at else 0) and not decoder.is_hidden(ids[at])


def _ends(ids: Sequence[int], decoder: Decoder) -> tuple[list[int], str]:
    """Where each token's text ends, and all of it."""
    detokenizer = decoder.start()
    feed: Callable[[Sequence[int]], str] = detokenizer.feed
    ends, pieces, length = [], [], 0
    for token in ids:
        piece = _BETWEEN if decoder.is_hidden(token) else feed((token,))
        length += len(piece)
        pieces.append(piece)
        ends.append(length)
    rest = detokenizer.finish()
    if rest and ends:
        ends[-1] += len(rest)
    return ends, "".join((*pieces, rest))


def _spans(positions: set[int]) -> Spans:
    if not positions:
        return ()
    ordered = sorted(positions)
    breaks = [(end, start) for end, start in pairwise(ordered) if start != end + 1]
    starts = [ordered[0], *(start for _, start in breaks)]
    return tuple(zip(starts, [*(end + 1 for end, _ in breaks), ordered[-1] + 1], strict=True))
