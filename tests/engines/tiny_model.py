"""A random Qwen3 of a few thousand parameters with a byte-level tokenizer, written as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.small_models import small_qwen3

VOCABULARY = 300
CONTEXT = 512
END = "<|im_end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, ids 0 to 255, followed by the chat tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def make_model(
    directory: Path, *, seed: int, hidden: int = 64, layers: int = 2, vocabulary: int = VOCABULARY
) -> Path:
    """Write the model; equal seeds give equal weights."""
    tokenizer = make_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    model = small_qwen3(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model.float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Large enough that one token is clearly the most probable, so that greedy decoding does not depend on
                # rounding.
                parameter.normal_(0.0, 0.12, generator=generator)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
