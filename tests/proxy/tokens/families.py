"""Chat templates in the style of the supported model families, each with its own special tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import CHATML, MARKERS, SPECIAL, byte_level_tokenizer, write_model

THINK = ("<think>", "</think>")

_CHATML_FRAME = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        REASONING
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}
            CALL
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENING' }}{%- endif %}
"""
_JSON_CALL = """
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}"""
_XML_CALL = """
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments | items %}
                {%- set structure = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + key + '>\\n' + (value | tojson if structure else value | string) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
_STRIPS = """
        {%- if loop.index0 > ns.last_query and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}"""
_KEEPS = """
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}"""

_CUTS = """
        {%- if '</think>' in message.content %}
            {%- set message = dict(message, content=message.content.split('</think>')[-1].lstrip('\\n')) %}
        {%- endif %}"""


def _chatml(*, call: str, reasoning: str = "", opening: str = "") -> str:
    text = _CHATML_FRAME.replace("CALL\n", call.lstrip() + "\n")
    return text.replace("REASONING", reasoning.strip()).replace("OPENING", opening)


LLAMA3 = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '; ' if not loop.first }}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
_SINGLE = """
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}"""
"""The check that the models' own template has here."""

_MISTRAL_FRAME = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        CALLS
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_LIST = _MISTRAL_FRAME.replace(
    "CALLS",
    """
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}""".lstrip(),
)
MISTRAL_NAMED = _MISTRAL_FRAME.replace(
    "CALLS",
    """
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}""".lstrip(),
)
MISTRAL_WITH_IDS = MISTRAL_NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + call.id + '[ARGS]'")

_LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_MISTRAL_SPECIAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A family. `tool_format` and `reasoning` are those detected in its template; `stop` is the token that ends an
    answer."""

    template: str
    tool_format: str
    reasoning: bool = False
    special: tuple[str, ...] = SPECIAL
    markers: tuple[str, ...] = MARKERS
    stop: str = "<|im_end|>"


FAMILIES = {
    "hermes": Family(template=CHATML, tool_format="hermes"),
    "qwen3": Family(
        template=_chatml(call=_JSON_CALL, reasoning=_STRIPS),
        tool_format="hermes",
        reasoning=True,
        markers=(*MARKERS, *THINK),
    ),
    "qwen3_thinking": Family(
        template=_chatml(call=_JSON_CALL, reasoning=_STRIPS, opening="<think>\\n"),
        tool_format="hermes",
        reasoning=True,
    ),
    "r1": Family(
        template=_chatml(call=_JSON_CALL, reasoning=_CUTS, opening="<think>\\n"), tool_format="hermes", reasoning=True
    ),
    "qwen3_coder": Family(template=_chatml(call=_XML_CALL), tool_format="qwen3_coder"),
    "qwen3_5": Family(
        template=_chatml(call=_XML_CALL, reasoning=_KEEPS, opening="<think>\\n"),
        tool_format="qwen3_coder",
        reasoning=True,
        markers=(*MARKERS, *THINK),
    ),
    "llama3": Family(
        template=LLAMA3, tool_format="llama3_json", special=_LLAMA_SPECIAL, markers=(), stop="<|eot_id|>"
    ),
    "llama3_single": Family(
        template=LLAMA3.replace("{%- if message.tool_calls %}", "{%- if message.tool_calls %}" + _SINGLE),
        tool_format="llama3_json",
        special=_LLAMA_SPECIAL,
        markers=(),
        stop="<|eot_id|>",
    ),
    "mistral_list": Family(
        template=MISTRAL_LIST, tool_format="mistral", special=_MISTRAL_SPECIAL, markers=(), stop="</s>"
    ),
    "mistral_named": Family(
        template=MISTRAL_NAMED, tool_format="mistral", special=_MISTRAL_SPECIAL, markers=(), stop="</s>"
    ),
    "mistral_ids": Family(
        template=MISTRAL_WITH_IDS, tool_format="mistral", special=_MISTRAL_SPECIAL, markers=(), stop="</s>"
    ),
}


@cache
def load(name: str) -> ChatTemplate:
    """Return a model of the family, without weights."""
    family = FAMILIES[name]
    with TemporaryDirectory() as directory:
        tokenizer = byte_level_tokenizer(family.special, family.markers)
        stop = tokenizer.token_to_id(family.stop)
        model = write_model(
            Path(directory),
            template=family.template,
            tokenizer=tokenizer,
            context_length=4096,
            eos=stop,
            eos_token=family.stop,
        )
        return ChatTemplate.load(str(model))
