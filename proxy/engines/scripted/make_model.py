"""Make `model/`, the default tokenizer of the scripted engine: `python -m proxy.engines.scripted.make_model`.

It is byte-level BPE, which can write any text, trained on the English and the Python code of the standard library.
`model/chat_template.jinja` is written by hand.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DIRECTORY = Path(__file__).parent / "model"
VOCABULARY = 4096
CONTEXT = 131072
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before merging, as in Qwen's tokenizers: words with the space before them, single digits."""
SOURCES = ("json.encoder", "asyncio.tasks", "email.message", "http.client", "pathlib", "typing")


def make_tokenizer() -> Tokenizer:
    """Train the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT, START, END],
        show_progress=False,
    )
    texts = [*topics.values()]
    texts += [inspect.getsource(importlib.import_module(name)) for name in SOURCES]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return tokenizer


def main() -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(str(DIRECTORY / "tokenizer.json"), pretty=False)
    end = tokenizer.token_to_id(END)
    files = {
        "config.json": {
            "model_type": "scripted",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT,
            "eos_token_id": end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END_OF_TEXT,
            "model_max_length": CONTEXT,
        },
    }
    for name, content in files.items():
        (DIRECTORY / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
