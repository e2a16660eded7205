"""Small model directories for tests: a byte-level tokenizer with ChatML tokens, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Strips earlier reasoning, and writes an empty thought into an answer that stands last."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>")
_CORPUS = [
    "The answer is 42. What is 17 + 25? Compute 3 * 4. Please work out 9 - 5.",
    '{"name": "calculator", "arguments": {"a": 17, "b": 25, "op": "+"}}',
    "system user assistant tool_response the and of to in that it is was for on are as with",
]


def byte_level_tokenizer(special: Sequence[str] = SPECIAL, markers: Sequence[str] = MARKERS) -> Tokenizer:
    """Return a tokenizer with all 256 bytes, some merges, special tokens, tool-call markers, and a phrase as an added
    token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*markers, "The answer is ", "né")])
    return tokenizer


def write_model(
    directory: Path,
    *,
    template: str | None = CHATML,
    tokenizer: Tokenizer | None = None,
    context_length: int | None = 512,
    eos: int | list[int] | None = 2,
    eos_token: str = "<|im_end|>",
) -> Path:
    """Write a directory with all files of a model except its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level_tokenizer()).save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if context_length is not None:
        config["max_position_embeddings"] = context_length
    (directory / "config.json").write_text(json.dumps(config))
    if eos is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    tokenizer_config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos is not None:
        tokenizer_config["eos_token"] = eos_token
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
