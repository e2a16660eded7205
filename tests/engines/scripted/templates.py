"""Chat templates of several families, reduced to their frames, over one byte-level tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

from proxy.engines.scripted.script import MODEL
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import THINKING, write_model

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + message.tool_calls | map(attribute='function') | list | tojson + '</s>' }}
    {%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
    {%- else %}{{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""

REASONER = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
"""Opens the reasoning in the prompt, and drops all earlier reasoning."""

SPECIAL = {
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
FAMILIES = ("own", "thinking", "reasoner", "llama", "mistral")


@functools.cache
def own_template() -> ChatTemplate:
    """The template of the engine's own model, read once."""
    return ChatTemplate.load(str(MODEL))


def family(name: str, folder: Path) -> ChatTemplate:
    if name == "own":
        return own_template()
    if name in ("thinking", "reasoner"):
        return ChatTemplate.load(
            str(write_model(folder, template={"thinking": THINKING, "reasoner": REASONER}[name]))
        )
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL[name])
    end = tokenizer.token_to_id({"llama": "<|eot_id|>", "mistral": "</s>"}[name])
    template = {"llama": LLAMA, "mistral": MISTRAL}[name].replace("bos_token", f"'{SPECIAL[name][0]}'")
    return ChatTemplate.load(str(write_model(folder, template=template, tokenizer=tokenizer, eos=end)))
