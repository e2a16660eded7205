"""The Jinja environment of chat templates, set up as in transformers. Templates are untrusted code, so it is a
sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, MutableMapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The names that every template is given.
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem"})
# The characters that JSON in ASCII escapes, except marks (`control_tokens`): these stand for ASCII characters.
_NOT_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]+")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with fast paths for `message.role` of a plain dict and for `loop.first`, the most frequent
    look-ups of templates. The result is the sandbox's: a name that is no attribute of dicts is looked up as an item.

    A template gets a copy of the globals that the environment has when the template is loaded.
    """

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        # Jinja makes a ChainMap, for globals that change later. Every rendering copies it, in 40 calls.
        return {**self.globals, **(d or {})}

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own words, for training masks. It changes no text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the filters and functions that chat templates use."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def known_arguments(environment: jinja2.Environment, texts: Iterable[str]) -> frozenset[str]:
    """Return the names that templates read beside those that every template is given."""
    read: set[str] = set()
    for text in texts:
        read |= meta.find_undeclared_variables(environment.parse(text))
    return frozenset(read - environment.globals.keys() - _GIVEN)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005  (templates expect the local date)
