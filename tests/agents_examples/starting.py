"""What a tiny checkpoint says before it has learnt anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agents_examples.calculator.sampling import sample
from agents_examples.tiny.vocabulary import render


def first_answers(
    checkpoint: Path,
    conversations: Sequence[Sequence[dict[str, Any]]],
    *,
    temperature: float,
    longest: int,
    tools: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Return one answer of at most `longest` tokens to each conversation, sampled without a constraint, from the
    same seed."""
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(checkpoint))
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = [
        tokenizer.encode(render(tokenizer, messages, tools=tools, generation_prompt=True))
        for messages in conversations
    ]
    stop, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    generator = torch.Generator().manual_seed(0)
    drawn = sample(
        model, prompts, temperature=temperature, longest=longest, stop=stop, padding=padding, generator=generator
    )
    return [str(tokenizer.decode(one.without(stop))) for one in drawn]
