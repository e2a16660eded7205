"""Redact token ids: replace those whose text a rule finds by a placeholder. All functions are pure.

A placeholder replaces each token, so that positions stay the same. The rules also see a window of the tokens before,
to find text that begins in an earlier turn and ends in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from proxy.redaction.text import TextRedactor

WINDOW = 256
"""Tokens searched before a turn's own. A longer match is only found as far as it lies within this many tokens."""
_ROUNDS = 4  # as for texts: the text around a placeholder may match anew
_SEPARATOR = "\n"  # the text of a special token, so that no match crosses the boundary of a message


class Detokenizer(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Decoder(Protocol):
    """The part of `tokens.detokenizer.TokenDecoder` used here. Hidden tokens are special ones without text."""

    def start(self) -> Detokenizer: ...

    def is_hidden(self, token: int) -> bool: ...


Spans = tuple[tuple[int, int], ...]


def masked_tokens(
    before: Sequence[int], own: Sequence[int], redactor: TextRedactor, decoder: Decoder, placeholder: int
) -> tuple[tuple[int, ...], Spans]:
    """Return `own` with placeholders, and the spans [start, end) of the placeholders.

    `before` are the tokens before them on the path of the conversation.
    """
    context = tuple(before[-WINDOW:])
    # The context is searched both as it was and as it is stored: whoever reads the stored tokens again must find
    # nothing either.
    contexts = {context, _replaced(context, redactor, decoder, placeholder)}
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
    """Return the positions in `own` of tokens whose text lies in a found range, at least in part."""
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
        # Tokens before with the first bytes of a character have no text of their own: the token that completes the
        # character has all of it.
        first = position - 1
        while first >= len(context) and at > position and _has_no_text(first, ids, ends, decoder):
            hits.add(first - len(context))
            first -= 1
    return hits


def _has_no_text(at: int, ids: Sequence[int], ends: Sequence[int], decoder: Decoder) -> bool:
    return ends[at] == (ends[at - 1] if at else 0) and not decoder.is_hidden(ids[at])


def _ends(ids: Sequence[int], decoder: Decoder) -> tuple[list[int], str]:
    """Return the end of each token's text, in characters, and the whole text."""
    detokenizer = decoder.start()
    feed: Callable[[Sequence[int]], str] = detokenizer.feed
    ends, pieces, length = [], [], 0
    for token in ids:
        piece = _SEPARATOR if decoder.is_hidden(token) else feed((token,))
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
