from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.formats.values import ParameterSchemas

MANY = {"anyOf": [{"$ref": "#"}] * 50}


def value(text: str, schema: Any, **more: Any) -> Any:
    return json.loads(ParameterSchemas({"type": "object", "properties": {"x": schema}, **more}).json_value("x", text))


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("5", {"type": "integer"}, 5),
        (" 5\n", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("٣", {"type": "integer"}, "٣"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("123456789012345678901234567890", {"type": "integer"}, 123456789012345678901234567890),
        ("-1.5e3", {"type": "number"}, -1500.0),
        ("1e999", {"type": "number"}, "1e999"),
        ("inf", {"type": "number"}, "inf"),
        ("NaN", {"type": "number"}, "NaN"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["integer", "null"]}, None),
        ("7", {"type": ["integer", "null"]}, 7),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
        ("seven", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "seven"),
        ("7", {"type": "integer", "nullable": True}, 7),
        ("null", {"type": "integer", "nullable": True}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ("7", {"allOf": [{"type": "integer"}]}, 7),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": [1]}', {"type": "array"}, '{"a": [1]}'),
        ("{'a': True, 'b': (1, None)}", {"type": "object"}, {"a": True, "b": [1, None]}),
        ("['\\d', 1]", {"type": "array"}, ["\\d", 1]),
        ("{'a': {1, 2}}", {"type": "object"}, "{'a': {1, 2}}"),
        ("{'a': 1e999}", {"type": "object"}, "{'a': 1e999}"),
        ("{(1, 2): 3}", {"type": "object"}, "{(1, 2): 3}"),
        ("[" * 10_000, {"type": "array"}, "[" * 10_000),
        ("[" + "-" * 50_000 + "1]", {"type": "array"}, "[" + "-" * 50_000 + "1]"),
        ("__import__('os')", {"type": "object"}, "__import__('os')"),
        ("5", {}, 5),
        ("5", True, 5),
        ("5", {"type": "int"}, 5),
        ("hello", {}, "hello"),
        ("[1]", {"items": {}}, [1]),
        ("5", {"$ref": "#/nowhere"}, 5),
        ("5", {"$ref": 7}, 5),
        ("5", {"anyOf": 7, "enum": 7, "allOf": 7, "type": 7}, 5),
    ],
)
def test_text_is_converted_to_the_type_in_the_schema(text: str, schema: Any, expected: Any) -> None:
    assert value(text, schema) == expected
    assert type(value(text, schema)) is type(expected)


def test_references_are_followed() -> None:
    definitions = {"Line": {"type": "integer"}, "a/b~c": {"type": "array"}}
    assert value("3", {"$ref": "#/$defs/Line"}, **{"$defs": definitions}) == 3
    assert value("[3]", {"$ref": "#/$defs/a~1b~0c"}, **{"$defs": definitions}) == [3]


@pytest.mark.parametrize("schema", [{"$ref": "#/properties/x"}, MANY, {"allOf": [MANY] * 50}])
def test_references_in_circles_end(schema: Any) -> None:
    assert value("3", schema, **MANY) == 3


@given(st.text(), st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "any"]))
def test_any_text_becomes_json(text: str, kind: str) -> None:
    """A value of type string stays unchanged."""
    found = value(text, {"type": kind})
    assert found == text or kind != "string"


@pytest.mark.parametrize("parameters", [None, 3, [], {"properties": 3}, {"properties": {"y": {"type": "integer"}}}])
def test_a_value_of_unknown_type_is_text(parameters: Any) -> None:
    assert ParameterSchemas(parameters).json_value("x", "5") == '"5"'
