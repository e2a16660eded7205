"""Streaming detokenisation: whole characters only, at a cost proportional to the new tokens.

Byte-level vocabularies (GPT-2 and after: Qwen, Llama 3, …) are decoded byte by byte. In others (SentencePiece,
WordPiece) the text of a token depends on its neighbours: a short window is decoded again with each token, and the
difference is the new text.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes: after so many tokens, a broken character stays broken.
_LONGEST_CHARACTER = 4


class Detokenizer(Protocol):
    """Decodes one answer. The texts of all `feed` calls and of `finish`, joined, are the decoded whole."""

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; it may be empty."""
        ...

    def finish(self) -> str:
        """Return the text that was held back: an incomplete character, as U+FFFD."""
        ...


class TokenDecoder:
    """Makes detokenisers for one tokenizer. Ids in `hidden` (special tokens) have no text."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(hidden)
        self._bytes = _vocabulary_bytes(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None
        self._shown = {token: text for token, text in (self._bytes or {}).items() if token not in self._hidden}

    def start(self) -> Detokenizer:
        if self._bytes is not None:
            return _ByteLevelDetokenizer(self._shown)
        return _WindowDetokenizer(self._tokenizer, self._hidden)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a whole answer."""
        detokenizer = self.start()
        return detokenizer.feed(ids) + detokenizer.finish()

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token on its own, also of a special token."""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()

    def is_hidden(self, token: int) -> bool:
        return token in self._hidden


class _ByteLevelDetokenizer:
    def __init__(self, shown: dict[int, bytes]) -> None:
        self._shown = shown
        self._rest = b""
        """The bytes of a character that is not complete yet."""

    def feed(self, ids: Sequence[int]) -> str:
        shown = self._shown
        found = self._rest + b"".join([shown[token] for token in ids if token in shown])
        # Not by an incremental decoder of `codecs`: making one takes longer than decoding a short answer.
        text, read = utf_8_decode(found, "replace", False)
        self._rest = found[read:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class _WindowDetokenizer:
    """Decodes a window of tokens. Those before `_read` are emitted already and give the new ones context."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._read = 0
        self._shown = ""

    def feed(self, ids: Sequence[int]) -> str:
        return "".join(self._step(token) for token in ids if token not in self._hidden)

    def _step(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and waiting < _LONGEST_CHARACTER:
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def finish(self) -> str:
        new = self._decode(self._window)[len(self._shown) :]
        self._shown += new
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _vocabulary_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of every id. A token with a character outside the byte alphabet is an added one, stored as
    plain text."""
    alphabet = byte_alphabet()
    vocabulary = {}
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        try:
            vocabulary[token] = bytes(alphabet[character] for character in text)
        except KeyError:
            vocabulary[token] = text.encode()
    return vocabulary


@lru_cache(maxsize=1)  # a constant, built at first use: no module does work at import
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: the byte for each of 256 printable characters. A printable byte stands for itself; the
    others have the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}
