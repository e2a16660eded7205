"""Tool-call formats: how models write calls. Each format is one file, and one line in the registry below.

A format recognises itself in a chat template, parses a model's output as it streams, and gives the grammar that holds
a model to its allowed calls. `tool_format.py` has the interface, `parsing.py` what the parsers share.
"""

from __future__ import annotations

from proxy.settings import ConfigurationError
from proxy.tokens.formats.hermes import HermesFormat
from proxy.tokens.formats.llama3_json import Llama3JsonFormat
from proxy.tokens.formats.mistral import MistralFormat
from proxy.tokens.formats.parsing import CallParser, ToolCall, Tools
from proxy.tokens.formats.qwen3_coder import Qwen3CoderFormat
from proxy.tokens.formats.tool_format import AllowedCall, ToolFormat

__all__ = [
    "TOOL_FORMATS",
    "AllowedCall",
    "CallParser",
    "ToolCall",
    "ToolFormat",
    "Tools",
    "check_tool_parser",
    "tool_format_for",
]

# The first format that recognises a template wins: Qwen3-Coder comes before Hermes, whose tag it shares.
TOOL_FORMATS: dict[str, ToolFormat] = {
    each.name: each for each in (Qwen3CoderFormat(), HermesFormat(), MistralFormat(), Llama3JsonFormat())
}


def check_tool_parser(name: str) -> None:
    """Raise ConfigurationError unless `name` is a value that `run.tool_parser` accepts."""
    accepted = ("auto", "none", *TOOL_FORMATS)
    if name not in accepted:
        listed = ", ".join(map(repr, accepted))
        raise ConfigurationError(f"run.tool_parser: there is no format {name!r}; accepted are {listed}")


def tool_format_for(template: str, tool_parser: str = "auto") -> ToolFormat | None:
    """Return the format of a model's tool calls, or None if its calls stay text.

    `template` is the source of the model's chat template. `tool_parser` is the run's setting: the name of a format,
    `auto` to detect the format in the template, `none` for no format. Raise ConfigurationError for any other name.
    """
    check_tool_parser(tool_parser)
    if tool_parser == "auto":
        found = next((each for each in TOOL_FORMATS.values() if each.writes(template)), None)
    else:
        found = TOOL_FORMATS.get(tool_parser)
    return found.for_template(template) if found is not None else None
