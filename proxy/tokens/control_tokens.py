"""Protection from contents that would form control tokens: only the chat template begins and ends turns.

A tokenizer turns the text `<|im_end|>` into the token that ends a turn, whoever wrote that text. So before a template
renders a content, the characters in it that could form a control token are replaced by marks: lone surrogates, which
no text from outside can hold. The strings keep their length, and the template writes them as before. When the
rendered text is tokenised, the text of a control token that contains a mark is spelled with ordinary tokens; all
other text gets its usual ids.
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
# There are 2,048 surrogates. The control tokens of a tokenizer are written with a few dozen characters.
_MOST_MARKS = 0x800
# Bounds memory: digests of 16 bytes each.
_MAX_UNMARKED_TOOLS = 4096
_ANY_MARK = re.compile("[\ud800-\udfff]")
_RESULT_ROLES = frozenset({"tool", "function"})
# Fields of a message that the template writes as part of a call or a result.
_DATA_KEYS = frozenset({"name", "tool_call_id", "tool_calls"})

_Value = TypeVar("_Value")


class ControlTokens:
    """Marks contents for a template and tokenises the rendered text. Safe to share between threads.

    `turns` are the texts of the tokens that no content may form. `data` are texts that additionally must not appear
    in results, tool definitions and the arguments of calls: the tags in which the template puts calls and results.
    `constants` are the template's own texts. Raise ConfigurationError for a tokenizer whose control tokens have too
    many different characters to be marked.
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
                f"{_MOST_MARKS} can be marked in contents: set run.allow_control_tokens = true to serve it"
            )
        self._marks = {character: chr(_FIRST_MARK + number) for number, character in enumerate(characters)}
        self._characters = {mark: character for character, mark in self._marks.items()}
        self._whole = any_of(texts)
        normalised = _loose_normaliser(tokenizer, texts)
        self._from_client = Shield(turns, self._marks, constants, normalised)
        self._data = Shield(texts, self._marks, constants, normalised)
        self._unmarked_tools: set[bytes] = set()
        self._anchor = self._find_anchor(turns)
        self._spelled = self._spell_all(texts)

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its contents marked. Its role needs no mark: it is one of a few known words."""
        is_result = message["role"] in _RESULT_ROLES
        changed = {}
        for key, value in message.items():
            if key != "role":
                shield = self._data if is_result or key in _DATA_KEYS else self._from_client
                marked = shield.value(value)
                if marked is not value:
                    changed[key] = marked
        return {**message, **changed} if changed else message

    def from_client(self, value: _Value) -> _Value:
        """Return a client's text or value (a prefill, an argument of the template) with marks."""
        return self._from_client.value(value)

    def tools(self, tools: list[Any]) -> list[Any]:
        """Return tool definitions with marks.

        Agents send the same definitions with every call, and definitions hold more text than most conversations. So
        the digests of those that need no marks are cached: encoding JSON is faster than searching it.
        """
        try:
            key = blake2b(msgspec.json.encode(tools), digest_size=16).digest()
        except OverflowError:  # an integer of more than 64 bits
            return self._data.value(tools)
        if key in self._unmarked_tools:
            return tools
        marked = self._data.value(tools)
        if marked is tools:
            if len(self._unmarked_tools) >= _MAX_UNMARKED_TOOLS:
                self._unmarked_tools.clear()
            self._unmarked_tools.add(key)
        return marked

    def restored(self, text: str) -> str:
        """Return `text` with every mark replaced by the character it stands for."""
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
        """Return the text of `ids`. Where ordinary tokens spell a control token, the text has a mark."""
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
        """Return the ids of text between spelled tokens, encoded as between control tokens: some tokenizers treat the
        beginning of a whole text differently."""
        if is_first or not text or self._anchor is None:
            return self._encode(text)
        anchor, anchor_text = self._anchor
        anchored = self._encode(anchor_text + text)
        return anchored[1:] if anchored[:1] == (anchor,) else self._encode(text)

    def _find_anchor(self, turns: Iterable[str]) -> tuple[int, str] | None:
        """Return a control token, id and text, that does not swallow the white space behind it; None if there is
        none."""
        swallowing = {entry.content for entry in self._tokenizer.get_added_tokens_decoder().values() if entry.rstrip}
        return next(((self._ids[text], text) for text in sorted(turns) if text not in swallowing), None)

    def _spell_all(self, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the ordinary tokens that spell each control token."""
        self._tokenizer.encode_special_tokens = True  # makes the tokenizer treat special tokens as text
        try:
            plain = {text: self._encode(text) for text in texts}
        finally:
            self._tokenizer.encode_special_tokens = False
        return {text: self._spell(text, ids) for text, ids in plain.items()}

    def _spell(self, text: str, plain: tuple[int, ...]) -> tuple[int, ...]:
        """Return ordinary tokens that spell `text`. If `plain` contains a control token (added tokens that are not
        special, or a vocabulary that has control tokens as words), the text is cut and its parts encoded."""
        without_control: tuple[int, ...] = ()
        for ids in self._spellings(text, plain):
            if self._id_set.isdisjoint(ids):
                if self._decodes_to(ids, text):
                    return ids
                without_control = without_control or ids
        return without_control

    def _decodes_to(self, ids: tuple[int, ...], text: str) -> bool:
        """Return whether `ids` decode to `text` behind a control token: at the beginning of a text some tokenizers
        omit a space."""
        anchor, anchor_text = ([self._anchor[0]], self._anchor[1]) if self._anchor is not None else ([], "")
        return bool(self._tokenizer.decode([*anchor, *ids], skip_special_tokens=False) == anchor_text + text)

    def _spellings(self, text: str, plain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield plain
        yield from (self._joined(text[:cut], text[cut:]) for cut in range(1, len(text)))
        yield self._joined(*text)

    def _joined(self, *parts: str) -> tuple[int, ...]:
        return tuple(token for part in parts for token in self._piece(part, is_first=False))


def _loose_normaliser(tokenizer: Tokenizer, tokens: Iterable[str]) -> Callable[[str], str] | None:
    """Return the tokenizer's normaliser if it turns other characters into a control token: wide ones (NFKC),
    capitals, or the Kelvin sign (NFC). Return None otherwise, as for most chat models."""
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
    """Return the texts in a template: those that it writes or compares with, and the names that it looks up."""
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    texts |= {node.attr for node in tree.find_all(nodes.Getattr)}
    return texts - {""}
