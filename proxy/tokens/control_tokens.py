"""Keeps contents from writing control tokens, so that only the chat template begins and ends turns.

A tokenizer turns the text `<|im_end|>` into the token that ends a turn, whoever wrote that text. So while a template
renders, the characters of a content that could make a control token are replaced by marks: lone surrogates, which no
text from outside can hold. The template sees strings of the same length and writes them where it always does. When
the rendered text is tokenised, a control token's text that covers a mark is spelled with ordinary tokens, and
everything else gets the ids that it always got.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from jinja2 import nodes
from tokenizers import Tokenizer

from proxy.settings import ConfigurationError
from proxy.tokens.shield import Shield, any_of

_FIRST_MARK = 0xD800
_MOST_MARKS = 0x800
"""There are 2,048 surrogates; the characters of a tokenizer's control tokens are some dozens."""
_REMEMBERED_TOOLS = 4096
"""Digests of 16 bytes."""
_ANY_MARK = re.compile("[\ud800-\udfff]")
_RESULT_ROLES = frozenset({"tool", "function"})
_DATA_KEYS = frozenset({"name", "tool_call_id", "tool_calls"})
"""Fields of a message that the template writes as part of a call or a result."""

_Value = TypeVar("_Value")


class ControlTokens:
    """Marks contents for a template, and tokenises what the template makes of them. Safe to share between threads.

    `turns` are the texts of the tokens that no content may write. `data` are those that results, tool definitions and
    the arguments of calls may not write besides: the tags in which the template puts calls and results. Raises
    ConfigurationError for a tokenizer with more control tokens than can be marked.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[str], tuple[int, ...]],
        *,
        turns: Collection[str],
        data: Collection[str],
        constants: Collection[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode
        texts = {*turns, *data}
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {entry.content: token for token, entry in added.items() if entry.content in texts}
        self._id_set = frozenset(self._ids.values())
        characters = sorted({character for text in texts for character in text})
        if len(characters) > _MOST_MARKS:
            raise ConfigurationError(
                f"the tokenizer's control tokens are written with {len(characters)} characters, and at most "
                f"{_MOST_MARKS} can be told apart in contents: set run.allow_control_tokens = true to serve it"
            )
        self._marks = {character: chr(_FIRST_MARK + number) for number, character in enumerate(characters)}
        self._characters = {mark: character for character, mark in self._marks.items()}
        self._whole = any_of(texts)
        normalised = _loose_normaliser(tokenizer, texts)
        self._said = Shield(turns, self._marks, constants, normalised)
        self._data = Shield(texts, self._marks, constants, normalised)
        self._unmarked_tools: set[bytes] = set()
        self._anchor = self._find_anchor(turns)
        self._spelled = self._spell_all(texts)

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its contents marked; its role is one of a few known words."""
        is_result = message["role"] in _RESULT_ROLES
        changed = {}
        for key, value in message.items():
            if key != "role":
                shield = self._data if is_result or key in _DATA_KEYS else self._said
                marked = shield.value(value)
                if marked is not value:
                    changed[key] = marked
        return {**message, **changed} if changed else message

    def said(self, value: _Value) -> _Value:
        """Return what a client says (a prefill, an argument of the template) with marks."""
        return self._said.value(value)

    def tools(self, tools: list[Any]) -> list[Any]:
        """Return tool definitions with marks.

        Agents send the same definitions with every call, and definitions hold more texts than most conversations. So
        those that need no marks are remembered by their JSON, which is written faster than it is searched.
        """
        try:
            key = blake2b(msgspec.json.encode(tools), digest_size=16).digest()
        except OverflowError:  # an integer of more than 64 bits
            return self._data.value(tools)
        if key in self._unmarked_tools:
            return tools
        marked = self._data.value(tools)
        if marked is tools:
            if len(self._unmarked_tools) >= _REMEMBERED_TOOLS:
                self._unmarked_tools.clear()
            self._unmarked_tools.add(key)
        return marked

    def restored(self, text: str) -> str:
        """Return `text` without marks."""
        return _ANY_MARK.sub(lambda mark: self._characters.get(mark[0], mark[0]), text)

    def encode(self, marked: str) -> tuple[int, ...]:
        """Return the ids of rendered text that holds marks."""
        text = self.restored(marked)
        places = (mark.start() for mark in _ANY_MARK.finditer(marked))
        place = next(places, len(text))
        ids: list[int] = []
        at = 0
        for found in self._whole.finditer(text):
            while place < found.start():
                place = next(places, len(text))
            if place < found.end():
                ids += self._piece(text[at : found.start()], is_first=at == 0)
                ids += self._spelled[found[0]]
                at = found.end()
        ids += self._piece(text[at:], is_first=at == 0)
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with marks where ordinary tokens spell a control token."""
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        written = sum(1 for token in ids if token in self._id_set)
        if len(self._whole.findall(text)) == written:
            return text
        parts: list[str] = []
        start = 0
        for end, token in enumerate([*ids, None]):
            if token is None or token in self._id_set:
                piece = str(self._tokenizer.decode(list(ids[start:end]), skip_special_tokens=False))
                parts.append(self._whole.sub(lambda found: self._marks[found[0][0]] + found[0][1:], piece))
                parts.append("" if token is None else str(self._tokenizer.id_to_token(token)))
                start = end + 1
        return "".join(parts)

    def _piece(self, text: str, *, is_first: bool) -> tuple[int, ...]:
        """Encode text between spelled tokens as a tokenizer encodes it between control tokens: some treat the
        beginning of a whole text differently."""
        if is_first or not text or self._anchor is None:
            return self._encode(text)
        anchor, anchor_text = self._anchor
        anchored = self._encode(anchor_text + text)
        return anchored[1:] if anchored[:1] == (anchor,) else self._encode(text)

    def _find_anchor(self, turns: Iterable[str]) -> tuple[int, str] | None:
        """A control token that does not swallow the white space behind it."""
        swallowing = {entry.content for entry in self._tokenizer.get_added_tokens_decoder().values() if entry.rstrip}
        return next(((self._ids[text], text) for text in sorted(turns) if text not in swallowing), None)

    def _spell_all(self, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """For each control token the ordinary tokens that spell it."""
        self._tokenizer.encode_special_tokens = True  # takes special tokens for text, as transformers can
        try:
            plain = {text: self._encode(text) for text in texts}
        finally:
            self._tokenizer.encode_special_tokens = False
        return {text: self._spell(text, ids) for text, ids in plain.items()}

    def _spell(self, text: str, plain: tuple[int, ...]) -> tuple[int, ...]:
        """Cut the text where `plain` is the token itself: added tokens that are not special, and vocabularies that
        hold control tokens as words."""
        harmless: tuple[int, ...] = ()
        for ids in self._ways(text, plain):
            if self._id_set.isdisjoint(ids):
                if self._reads(ids, text):
                    return ids
                harmless = harmless or ids
        return harmless

    def _reads(self, ids: tuple[int, ...], text: str) -> bool:
        """Whether `ids` behind a control token are `text`; at the beginning some tokenizers leave out a space."""
        anchor, anchor_text = ([self._anchor[0]], self._anchor[1]) if self._anchor is not None else ([], "")
        return bool(self._tokenizer.decode([*anchor, *ids], skip_special_tokens=False) == anchor_text + text)

    def _ways(self, text: str, plain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield plain
        yield from (self._joined(text[:cut], text[cut:]) for cut in range(1, len(text)))
        yield self._joined(*text)

    def _joined(self, *parts: str) -> tuple[int, ...]:
        return tuple(token for part in parts for token in self._piece(part, is_first=False))


def _loose_normaliser(tokenizer: Tokenizer, tokens: Iterable[str]) -> Callable[[str], str] | None:
    """The tokenizer's normaliser where it makes a control token of other characters: of wide ones (NFKC), of
    capitals, of the Kelvin sign (NFC). Most chat models have none, or one that does not."""
    normaliser = tokenizer.normalizer
    if normaliser is None:
        return None
    for token in tokens:
        wide = token.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)})
        for variant in (wide, token.upper(), token.replace("K", "\u212a")):
            if variant != token and token in str(normaliser.normalize_str(variant)):
                return normaliser.normalize_str  # type: ignore[no-any-return]
    return None


def constants_of(tree: nodes.Template) -> set[str]:
    """The texts that stand in a template: what it writes, what it compares with, the names it looks up."""
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    texts |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return texts - {""}
