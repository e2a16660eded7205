"""The tokenizer of a tiny checkpoint: byte-level BPE whose merges may span the words of a line, so that phrases
become tokens.

A conversation of the calculator takes about 54 tokens, including the tool's description; splitting by words would
take over 200. Digits are always single tokens, because numbers have to be copied digit by digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
CONTROL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LARGEST_VOCABULARY = 640

_PIECES = r"\p{N}|[^\n\p{N}]+\n*|\n+"
"""A digit; a stretch of a line without digits, with the line breaks that end it; or line breaks."""


def chat_template() -> str:
    return (Path(__file__).parent / "chat_template.jinja").read_text()


def empty_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with bytes, control and tag tokens only, which renders the chat template before there is a
    vocabulary."""
    return train_tokenizer([])


def train_tokenizer(
    corpus: Iterable[str], *, largest_vocabulary: int = LARGEST_VOCABULARY, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Learn the merges from rendered conversations. Special tokens are never part of a merge.

    Each of `words` is a token of its own wherever it stands alone, and copying it means copying one token; they are
    not counted in `largest_vocabulary`.
    """
    patterns = [re.escape(token) for token in CONTROL_TOKENS + TAG_TOKENS]
    patterns += [rf"\b{re.escape(word)}\b" for word in words]
    special = re.compile("|".join(patterns))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=largest_vocabulary - len(CONTROL_TOKENS) - len(TAG_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((piece for text in corpus for piece in special.split(text) if piece), trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAG_TOKENS])
    bpe.add_tokens([AddedToken(word, special=False, normalized=False, single_word=True) for word in words])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template()
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    generation_prompt: bool = False,
) -> str:
    """Return a conversation as text, with the descriptions of the tools, as the server renders it for the agent."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
    )
    assert isinstance(text, str)
    return text
