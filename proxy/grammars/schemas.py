"""JSON schemas that constrain answers: checks that every keyword of a schema can be enforced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_SCHEMAS = 10_000
DEEPEST = 60
"""The deepest nesting of schemas, references followed. Grammar compilers recurse, and some overflow their stack."""

FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"},
)
ENFORCED = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
UNENFORCED = frozenset(
    {
        "$anchor",
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "$vocabulary",
        "additionalItems",
        "contains",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",
    }
)
"""Keywords that restrict values and cannot be enforced. Keywords in neither set restrict nothing: titles,
descriptions, defaults, and names that JSON Schema does not define."""

_IN_OBJECTS = ("$defs", "definitions", "patternProperties", "properties")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE = ("additionalProperties", "items")
_BOUNDS = ("minLength", "maxLength", "pattern", "format")


class SchemaRefused(ValueError):
    """A schema cannot be enforced. `place` are the keys that lead to the part in question."""

    def __init__(self, place: tuple[str, ...], reason: str) -> None:
        super().__init__(f"{'.'.join(place)}: {reason}" if place else reason)
        self.place = place
        self.reason = reason


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise SchemaRefused for a keyword that no back end enforces, for an invalid schema, and for one beyond
    bounds."""
    for count, (place, each) in enumerate(subschemas(schema)):
        if count >= MOST_SCHEMAS:
            raise SchemaRefused(place, f"there are more than {MOST_SCHEMAS} schemas inside of this one")
        _check_keywords(each, place)
    _check_references(schema)


def check_for_xgrammar(schema: Mapping[str, Any]) -> None:
    """Raise SchemaRefused for keywords that XGrammar accepts without enforcing them, as observed with version
    0.2.7."""
    for place, each in subschemas(schema):
        said = ENFORCED & each.keys()
        for keyword in ("multipleOf", "oneOf", "patternProperties"):
            if keyword in said:
                raise SchemaRefused((*place, keyword), "the engine's XGrammar does not enforce it")
        for keyword in ("$ref", "anyOf", "allOf"):
            if keyword in said and len(said) > 1:
                raise SchemaRefused((*place, keyword), "the engine's XGrammar does not enforce what stands beside it")
        if len(each.get("allOf", ())) > 1:
            raise SchemaRefused((*place, "allOf"), "the engine's XGrammar does not enforce several at once")
        if ("enum" in said or "const" in said) and not said <= {"enum", "const", "type"}:
            raise SchemaRefused(place, "the engine's XGrammar does not enforce what stands beside enum and const")
        if len({"length" if key.endswith("Length") else key for key in _BOUNDS if key in said}) > 1:
            raise SchemaRefused(place, "the engine's XGrammar enforces one of pattern, format and length")


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield a schema and the schemas in it, each with its place. References are not followed. Raise SchemaRefused for
    anything else in the place of a schema."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while waiting:
        place, each = waiting.pop()
        if isinstance(each, bool) and place:
            continue
        if not isinstance(each, Mapping):
            raise SchemaRefused(place, "a schema is an object")
        if len(place) > 2 * DEEPEST:
            raise SchemaRefused(place[:8], f"schemas are nested more than {DEEPEST} deep")
        yield place, each
        waiting += [((*place, *step), child) for step, child in _children(each, place)]


def _children(schema: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for keyword in _ALONE:
        if keyword in schema:
            yield (keyword,), schema[keyword]
    for keyword in _IN_LISTS:
        if keyword in schema:
            if not isinstance(schema[keyword], list) or not schema[keyword]:
                raise SchemaRefused((*place, keyword), "it is a list of schemas, and not an empty one")
            yield from (((keyword, str(index)), each) for index, each in enumerate(schema[keyword]))
    for keyword in _IN_OBJECTS:
        if keyword in schema:
            if not isinstance(schema[keyword], Mapping):
                raise SchemaRefused((*place, keyword), "it is an object of schemas")
            yield from (((keyword, name), each) for name, each in schema[keyword].items())


def _check_keywords(schema: Mapping[str, Any], place: tuple[str, ...]) -> None:
    for keyword in schema:
        if keyword in UNENFORCED:
            raise SchemaRefused((*place, keyword), "this keyword cannot be enforced")
    if "format" in schema and schema["format"] not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise SchemaRefused((*place, "format"), f"the formats that can be enforced are {known}")
    if not isinstance(schema.get("required", []), list):
        raise SchemaRefused((*place, "required"), "it is a list of names")


def _check_references(root: Mapping[str, Any]) -> None:
    """Raise SchemaRefused for invalid references and too deep nesting. Each reference is followed once, as compilers
    do."""
    seen: set[str] = set()
    waiting: list[tuple[tuple[str, ...], Any, int]] = [((), root, 0)]
    while waiting:
        place, schema, depth = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        if depth > DEEPEST:
            raise SchemaRefused(place[:8], f"schemas are nested more than {DEEPEST} deep, references followed")
        reference = schema.get("$ref")
        if reference is not None and reference not in seen:
            found = referenced(root, reference, place)
            seen.add(reference)
            waiting.append((place, found, depth + 1))
        waiting += [
            ((*place, *step), child, depth + 1)
            for step, child in _children(schema, place)
            if step[0] not in ("$defs", "definitions")
        ]


def referenced(root: Mapping[str, Any], reference: Any, place: tuple[str, ...] = ()) -> Any:
    """Return the schema to which a reference leads, over further references. Raise SchemaRefused for a reference to
    nothing, to another document, or to itself."""
    passed: set[str] = set()
    while True:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaRefused((*place, "$ref"), "references lead to places in the same schema: #/$defs/…")
        if reference in passed:
            raise SchemaRefused((*place, "$ref"), f"the reference {reference} leads to itself")
        passed.add(reference)
        found: Any = root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise SchemaRefused((*place, "$ref"), f"there is nothing at {reference}")
        if not isinstance(found, Mapping) or "$ref" not in found:
            return found
        reference = found["$ref"]
