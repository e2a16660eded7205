from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from proxy.tokens.detokenizer import TokenDecoder
from tests.proxy.tokens.models import MARKERS, SPECIAL, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()


def token_id(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token


HIDDEN = frozenset(token_id(BYTE_LEVEL, text) for text in SPECIAL)


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's: `▁` for spaces, single bytes as `<0x..>`, a leading space stripped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁answer", "is", "é", "4", "▁▁"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def in_pieces(decoder: TokenDecoder, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = decoder.start()
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.feed(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*pieces, detokenizer.finish()]


@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), st.lists(st.integers(0, 40), max_size=8)
)
def test_any_split_gives_the_tokenizers_own_text(ids: list[int], cuts: list[int]) -> None:
    decoder = TokenDecoder(BYTE_LEVEL, hidden=HIDDEN)
    whole = BYTE_LEVEL.decode([token for token in ids if token not in HIDDEN], skip_special_tokens=False)
    assert "".join(in_pieces(decoder, ids, cuts)) == whole
    assert decoder.text(ids) == whole


@given(st.text())
def test_characters_come_whole(text: str) -> None:
    decoder = TokenDecoder(BYTE_LEVEL, hidden=HIDDEN)
    detokenizer = decoder.start()
    so_far = ""
    for token in BYTE_LEVEL.encode(text, add_special_tokens=False).ids:
        if token in HIDDEN:
            return
        so_far += detokenizer.feed([token])
        assert text.startswith(so_far)
    assert so_far + detokenizer.finish() == text


@given(st.text(alphabet="the answer is 4é🎉日 \n"), st.lists(st.integers(0, 60), max_size=8))
def test_vocabularies_that_look_at_neighbours(text: str, cuts: list[int]) -> None:
    ids = [token_id(FALLBACK, "▁answer")]
    for character in text:
        piece = FALLBACK.token_to_id(character.replace(" ", "▁"))
        ids += [piece] if piece is not None else [token_id(FALLBACK, f"<0x{b:02X}>") for b in character.encode()]
    pieces = in_pieces(TokenDecoder(FALLBACK, hidden=()), ids, cuts)
    assert "".join(pieces) == FALLBACK.decode(ids, skip_special_tokens=False) == "answer" + text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    for tokenizer in (BYTE_LEVEL, FALLBACK):
        byte = token_id(tokenizer, "Ã" if tokenizer is BYTE_LEVEL else "<0xC3>")
        detokenizer = TokenDecoder(tokenizer, hidden=()).start()
        assert (detokenizer.feed([byte]), detokenizer.finish(), detokenizer.finish()) == ("", "\ufffd", "")


def test_broken_bytes_do_not_hold_the_text_back_for_ever() -> None:
    byte = token_id(FALLBACK, "<0xFF>")
    detokenizer = TokenDecoder(FALLBACK, hidden=()).start()
    assert "\ufffd" in "".join(detokenizer.feed([byte]) for _ in range(8))


def test_special_tokens_are_hidden_and_markers_are_not() -> None:
    decoder = TokenDecoder(BYTE_LEVEL, hidden=HIDDEN)
    ids = BYTE_LEVEL.encode("<|im_start|>a<tool_call>b</tool_call><|im_end|>").ids
    assert decoder.text(ids) == "a<tool_call>b</tool_call>"
    assert [decoder.is_hidden(token_id(BYTE_LEVEL, text)) for text in (*MARKERS, *SPECIAL)] == [False] * 2 + [
        True
    ] * 3


def test_added_tokens_with_spaces_and_accents() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("ünï cödé", normalized=False)])
    ids = tokenizer.encode("The answer is né ünï cödé").ids
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert TokenDecoder(tokenizer, hidden=()).text(ids) == whole


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, FALLBACK], ids=["byte-level", "fallback"])
def test_the_bytes_of_a_single_token(tokenizer: Tokenizer) -> None:
    decoder = TokenDecoder(tokenizer, hidden=())
    assert decoder.token_bytes(token_id(tokenizer, "4" if tokenizer is FALLBACK else "Ġas")) in (b"4", b" as")
    assert decoder.token_bytes(10**6) == b""
