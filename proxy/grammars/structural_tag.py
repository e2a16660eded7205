"""Structural tags: a language for the sequence of text and JSON in an answer, and its translation for llguidance.

The form is the part of XGrammar's (`{"type": "structural_tag", "format": {…}}`) that this project writes; SGLang with
XGrammar accepts it unchanged. For llguidance, which SGLang and the embedded engine offer too, `lark_of` translates it
to a grammar in llguidance's variant of Lark. The formats are:

- text: `const_string`, `regex`, `any_text` (`excludes`);
- JSON: `json_schema` (`style` json or qwen_xml, `max_whitespace_cnt`);
- combinations: `sequence`, `or`, `optional`, `tag` (`begin`, `content`, `end`), `tags_with_separator`,
  `triggered_tags`.

llguidance distinguishes a special token from its text. So `tokens`, beside `format`, has the ids of the texts that
are tokens of the model. XGrammar ignores it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.grammars.schemas import referenced

Format = Mapping[str, Any]

LARK_HEAD = '%llguidance {"no_forcing": true}'
"""The first line of every grammar for llguidance. Without it, where only one text can follow, llguidance would allow
only the tokens that the tokenizer makes of it, and would read `<|im_end|>` in a schema's text as the token that ends
the answer."""

_ANY = "(?s:.*)"
_SPACE = r"[ \n\r\t]"


class StructuralTagUnsupported(ValueError):
    """The tag has a part that cannot be translated for llguidance."""


class _Tag(msgspec.Struct, frozen=True):
    format: dict[str, Any]
    tokens: dict[str, int] = {}


def structural_tag(content: Format, tokens: Mapping[str, int]) -> str:
    """Return the tag as text. `tokens` are the ids of the texts in it that are tokens of the model."""
    return json.dumps({"type": "structural_tag", "format": content, "tokens": tokens}, ensure_ascii=False)


def lark_of(tag: str) -> str:
    """Return a Lark grammar that matches the same texts as the tag. Raise StructuralTagUnsupported."""
    try:
        read = msgspec.json.decode(tag, type=_Tag)
    except msgspec.DecodeError as error:
        raise StructuralTagUnsupported(f"not a structural tag: {error}") from error
    return _Lark(read.tokens).write(read.format)


def with_whitespace(schema: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """Return a schema for llguidance that allows at most `most` characters of white space in each place of the
    JSON."""
    if most is None:
        return dict(schema)
    options = {"whitespace_pattern": f"{_SPACE}{{1,{most}}}"} if most else {"whitespace_flexible": False}
    return {"x-guidance": options, **schema}


class _Lark:
    """Writes one grammar. Expressions are names of rules, literals and token references, joined by spaces."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._lines = [LARK_HEAD]
        self._count = 0
        self._writers: dict[str, Callable[[Format], str]] = {
            "const_string": lambda node: self._const(_text(node, "value")),
            "regex": lambda node: self._terminal(f"/{in_slashes(_text(node, 'pattern'))}/"),
            "any_text": lambda node: self._terminal(_without(_texts(node, "excludes"))),
            "json_schema": self._json,
            "sequence": lambda node: self._sequence(_formats(node, "elements")),
            "or": lambda node: self._choice([self.of(each) for each in _formats(node, "elements")]),
            "optional": lambda node: f"({self._rule(self.of(_format(node, 'content')))})?",
            "tag": lambda node: self._sequence(_parts(node)),
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }

    def write(self, root: Format) -> str:
        start = self.of(root)
        return "\n".join([*self._lines, f"start: {start}"])

    def of(self, node: Format) -> str:
        write = self._writers.get(node.get("type", ""))
        if write is None:
            raise StructuralTagUnsupported(f"formats of type {node.get('type')!r}")
        return write(node)

    def _rule(self, body: str, options: str = "") -> str:
        self._count += 1
        name = f"r{self._count}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        self._count += 1
        name = f"T{self._count}"
        self._lines.append(f"{name}: {body}")
        return name

    def _choice(self, bodies: Sequence[str]) -> str:
        return self._rule(" | ".join(bodies))

    def _const(self, text: str) -> str:
        """Return an expression for `text`: tokens by their ids, the text between them as literals."""
        if not self._tokens:
            return _literal(text)
        pattern = "|".join(re.escape(each) for each in sorted(self._tokens, key=len, reverse=True))
        pieces = re.split(f"({pattern})", text)
        written = [f"<[{self._tokens[each]}]>" if each in self._tokens else _literal(each) for each in pieces if each]
        return " ".join(written) or '""'

    def _json(self, node: Format) -> str:
        schema = node.get("json_schema")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise StructuralTagUnsupported("a json_schema that is no object")
        most = node.get("max_whitespace_cnt")
        if node.get("style", "json") == "json":
            return self._rule(_json_rule(with_whitespace(schema, most)))
        if node["style"] == "qwen_xml":
            return self._parameters(schema, most)
        raise StructuralTagUnsupported(f"json_schema in the style {node['style']!r}")

    def _sequence(self, nodes: Sequence[Format]) -> str:
        """Return an expression for `nodes` in sequence. Free text before a marker becomes one rule with the marker,
        which ends at the marker's first occurrence."""
        written, index = [], 0
        while index < len(nodes):
            node, behind = nodes[index], nodes[index + 1] if index + 1 < len(nodes) else {}
            ending = self._ending(node, behind)
            if ending is None:
                written.append(self.of(node))
                index += 1
                continue
            others = [each for each in _texts(node, "excludes") if each != ending]
            written.append(self._up_to(ending, others))
            if rest := _text(behind, "value")[len(ending) :]:
                written.append(self._const(rest))
            index += 2
        return " ".join(each for each in written if each != '""') or '""'

    def _ending(self, node: Format, behind: Format) -> str | None:
        """Return the excluded text with which `behind` begins, if it is text and not a token."""
        if node.get("type") != "any_text" or behind.get("type") != "const_string":
            return None
        value = _text(behind, "value")
        return next(
            (each for each in _texts(node, "excludes") if value.startswith(each) and not self._is_token(each)), None
        )

    def _is_token(self, text: str) -> bool:
        return any(text.startswith(each) for each in self._tokens)

    def _up_to(self, ending: str, others: Sequence[str]) -> str:
        body = f"/{_ANY}{_escaped(ending)}/"
        return self._rule(f"{body} & {_without(others)}" if others else body, "[lazy]")

    def _separated(self, node: Format) -> str:
        call = self._choice([self.of(each) for each in _formats(node, "tags")])
        calls = call
        if not node.get("stop_after_first"):
            calls = self._rule(f"{call} ({self._const(_text(node, 'separator'))} {call})*")
        return calls if node.get("at_least_one") else f"({calls})?"

    def _triggered(self, node: Format) -> str:
        """Return an expression for text in which whatever begins with the trigger is one of the tags."""
        triggers = _texts(node, "triggers")
        if len(triggers) != 1 or node.get("at_least_one"):
            raise StructuralTagUnsupported("several triggers, or at_least_one beside a trigger")
        trigger, excludes = triggers[0], _texts(node, "excludes")
        behind = []
        for tag in _formats(node, "tags"):
            begin, *rest = _parts(tag)
            if not _text(begin, "value").startswith(trigger):
                raise StructuralTagUnsupported(f"a tag that does not begin with {trigger!r}")
            cut = {"type": "const_string", "value": _text(begin, "value")[len(trigger) :]}
            behind.append(self._sequence([cut, *rest]))
        text = self._terminal(_without([trigger, *excludes]))
        token = self._is_token(trigger)
        head = f"{text} {self._const(trigger)}" if token else self._up_to(trigger, excludes)
        call = self._rule(f"{head} {self._choice(behind)}")
        if node.get("stop_after_first"):
            return self._choice([call, text])
        return self._rule(f"({call})* {text}")

    def _parameters(self, schema: Mapping[str, Any], most: int | None) -> str:
        """Return an expression for the properties of `schema` in its order: `<parameter=key>`, the value on lines of
        its own, `</parameter>`, with a line break between two."""
        required = schema.get("required", [])
        wanted = [
            (self._parameter(key, each, schema, most), key in required)
            for key, each in schema.get("properties", {}).items()
        ]
        more = schema.get("additionalProperties", True)
        if more is not False:
            key = self._terminal(r"/[^<>\n]{1,128}/")
            other = self._rule(f'"<parameter=" {key} ">\\n" {self._plain_text({})}')
            tail, first = self._rule(f'("\\n" {other})*'), self._rule(f'({other} ("\\n" {other})*)?')
        else:
            tail = first = '""'
        for each, needed in reversed(wanted):
            first = self._rule(f"{each} {tail}" if needed else f"{each} {tail} | {first}")
            tail = self._rule(f'"\\n" {each} {tail}' if needed else f'"\\n" {each} {tail} | {tail}')
        return first

    def _parameter(self, key: str, schema: Any, root: Mapping[str, Any], most: int | None) -> str:
        found = _resolved(schema, root)
        head = _literal(f"<parameter={key}>\n")
        if "string" not in xml_kinds(found):
            options = {name: root[name] for name in ("$defs", "definitions") if name in root}
            value = self._rule(_json_rule(with_whitespace({**found, **options}, most)))
            return self._rule(f'{head} {value} "\\n</parameter>"')
        if values := _values(found):
            choice = self._choice([_literal(each if isinstance(each, str) else json.dumps(each)) for each in values])
            return self._rule(f'{head} {choice} "\\n</parameter>"')
        return self._rule(f"{head} {self._plain_text(found)}")

    def _plain_text(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a text value and its end, which is the first end tag."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        value = _ANY if not least and most == "" else f"(?s:.){{{least},{most}}}"
        end = r"\n<\/parameter>"
        return self._rule(f"/{value}{end}/ & ~/{_ANY}<\\/parameter>(?s:.+)/", "[lazy]")


def xml_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows for a parameter between XML tags."""
    if (values := _values(schema)) is not None:
        return frozenset("string" if isinstance(each, str) else "other" for each in values)
    named = schema.get("type")
    if named is None:
        choices = next((schema[each] for each in ("anyOf", "oneOf") if each in schema), None)
        if choices is None:
            return frozenset({"string", "other"})
        return frozenset().union(*(xml_kinds(each) for each in choices if isinstance(each, Mapping)))
    return frozenset(named if isinstance(named, list) else [named])


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema to which references inside of `root` lead."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = referenced(root, schema["$ref"])
    if not isinstance(schema, Mapping):
        raise StructuralTagUnsupported("a parameter whose schema is no object")
    return schema


def _parts(tag: Format) -> list[Format]:
    """Return a tag as a sequence. Free text in it goes up to the tag's end."""
    content, end = _format(tag, "content"), _text(tag, "end")
    if content.get("type") == "any_text" and end:
        content = {**content, "excludes": sorted({*_texts(content, "excludes"), end}, key=len)}
    return [
        {"type": "const_string", "value": _text(tag, "begin")},
        content,
        {"type": "const_string", "value": end},
    ]


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(excludes: Sequence[str]) -> str:
    """Return a terminal for any text that contains none of `excludes`."""
    return " & ".join([f"/{_ANY}/", *(f"~/{_ANY}{_escaped(each)}{_ANY}/" for each in excludes)])


def _escaped(text: str) -> str:
    """Return the regular expression for `text`, written between slashes."""
    return in_slashes(re.escape(text).replace("\n", "n"))


def in_slashes(pattern: str) -> str:
    """Return a regular expression as it is written between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")


def _text(node: Format, key: str) -> str:
    value = node.get(key, "")
    if not isinstance(value, str):
        raise StructuralTagUnsupported(f"{key} of {node.get('type')!r} is no text")
    return value


def _texts(node: Format, key: str) -> list[str]:
    value = node.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise StructuralTagUnsupported(f"{key} of {node.get('type')!r} are no texts")
    return value


def _format(node: Format, key: str) -> Format:
    value = node.get(key)
    if not isinstance(value, dict):
        raise StructuralTagUnsupported(f"{key} of {node.get('type')!r} is no format")
    return value


def _formats(node: Format, key: str) -> list[Format]:
    value = node.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise StructuralTagUnsupported(f"{key} of {node.get('type')!r} are no formats")
    return value
