"""Constraints in the form of each grammar back end, and constraints that none of them accepts."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from proxy.contract.turn import Constraint, ConstraintKind, SamplingParameters
from proxy.engines.grammars import constraint_for
from proxy.engines.requests import sampling_body
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.grammars.schemas import SchemaRefused, check_for_xgrammar, check_schema
from proxy.grammars.structural_tag import LARK_HEAD, StructuralTagUnsupported, lark_of, structural_tag

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def constraint(kind: str, text: Any) -> Constraint:
    return Constraint(kind=ConstraintKind(kind), text=text if isinstance(text, str) else json.dumps(text))


def follows(grammar: Constraint, text: str) -> bool:
    """Return whether the bytes, one token each, form a complete answer."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("ebnf", grammar.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("backend", ["none", None, "something"])
@pytest.mark.parametrize("kind", list(ConstraintKind))
def test_without_a_back_end_nothing_is_sent(backend: str | None, kind: ConstraintKind) -> None:
    with pytest.raises(UnsupportedParameter, match="constrained decoding"):
        constraint_for(constraint(kind.value, "{}"), backend)


def test_outlines_has_no_tags() -> None:
    plain = constraint("json_schema", SCHEMA)
    assert constraint_for(plain, "outlines") == plain
    with pytest.raises(UnsupportedParameter, match="outlines"):
        constraint_for(constraint("structural_tag", "{}"), "outlines")


def test_for_llguidance_all_are_grammars_that_do_not_force_tokens() -> None:
    for given, good, bad in (
        (constraint("json_schema", SCHEMA), '{"a": "<|im_end|>"}', '{"b": 1}'),
        (constraint("json_schema", SCHEMA), '{"a":' + " " * 20 + '""}', '{"a":' + " " * 21 + '""}'),
        (constraint("regex", r'a/b\/c"\n?'), 'a/b/c"\n', "ab"),
        (constraint("structural_tag", structural_tag({"type": "const_string", "value": "x"}, {})), "x", "y"),
    ):
        written = constraint_for(given, "llguidance")
        assert written.kind is ConstraintKind.EBNF
        assert written.text.startswith(LARK_HEAD)
        assert follows(written, good)
        assert not follows(written, bad)
    for given in (
        constraint("ebnf", 'root ::= "a"'),
        constraint("structural_tag", {"structures": [], "triggers": []}),
    ):
        assert constraint_for(given, "llguidance") == given


def test_for_xgrammar_all_are_as_they_are() -> None:
    for given in (constraint("json_schema", SCHEMA), constraint("regex", "a"), constraint("ebnf", 'root ::= "a"')):
        assert constraint_for(given, "xgrammar") == given


def test_a_constraint_is_a_field_of_the_sampling_parameters() -> None:
    sampling = SamplingParameters(max_new_tokens=1, constraint=constraint("regex", "a"))
    assert sampling_body(sampling, "xgrammar")["regex"] == "a"
    with pytest.raises(UnsupportedParameter):
        sampling_body(sampling)


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_invalid_json_is_an_error_of_the_request(kind: str) -> None:
    for backend in ("llguidance", "xgrammar"):
        with pytest.raises(InvalidRequest, match="JSON object"):
            constraint_for(constraint(kind, "[" * 5000), backend)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 2},
        {"properties": {"a": {"oneOf": [{"type": "null"}]}}},
        {"items": {"patternProperties": {"^a": {}}}},
        {"allOf": [{"type": "integer"}, {"minimum": 5}]},
        {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}},
        {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]},
        {"enum": ["a"], "minLength": 3},
        {"type": "string", "pattern": "^a+$", "minLength": 3},
    ],
)
def test_schemas_that_xgrammar_would_ignore_are_refused(schema: dict[str, Any]) -> None:
    check_schema(schema)
    with pytest.raises(SchemaRefused):
        check_for_xgrammar(schema)
    in_a_tag = {"type": "tag", "begin": "", "end": "", "content": {"type": "json_schema", "json_schema": schema}}
    for given in (
        constraint("json_schema", schema),
        constraint("structural_tag", structural_tag({"type": "or", "elements": [in_a_tag]}, {})),
    ):
        with pytest.raises(UnsupportedParameter, match="XGrammar"):
            constraint_for(given, "xgrammar")


def test_schemas_that_xgrammar_enforces_are_accepted() -> None:
    check_for_xgrammar(
        {
            "type": "object",
            "title": "T",
            "properties": {
                "a": {"$ref": "#/$defs/a", "description": "says nothing"},
                "b": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3, "minLength": 1}]},
                "c": {"type": "string", "enum": ["x"], "title": "C"},
                "d": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1},
            },
            "$defs": {"a": {"type": "integer", "minimum": 3}},
        }
    )


@pytest.mark.parametrize(
    "content",
    [
        {"type": "sorcery"},
        {"type": "const_string", "value": 3},
        {"type": "json_schema", "json_schema": 3},
        {"type": "json_schema", "json_schema": {}, "style": "glm_xml"},
        {"type": "sequence", "elements": []},
        {"type": "sequence", "elements": [3]},
        {"type": "optional"},
        {"type": "any_text", "excludes": [""]},
        {"type": "triggered_tags", "triggers": ["a", "b"], "tags": []},
        {
            "type": "triggered_tags",
            "triggers": ["a"],
            "tags": [{"type": "tag", "begin": "b", "content": {"type": "any_text"}, "end": ""}],
        },
    ],
)
def test_tags_that_cannot_be_written_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(StructuralTagUnsupported):
        lark_of(structural_tag(content, {}))


def test_text_goes_up_to_the_first_marker_and_no_further() -> None:
    thought = {"type": "tag", "begin": "<t>", "content": {"type": "any_text", "excludes": ["<t>"]}, "end": "</t>"}
    answer = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "[0-9]+/"}]}
    grammar = constraint_for(constraint("structural_tag", structural_tag(answer, {})), "llguidance")
    assert follows(grammar, "<t>a\nb</t>12/")
    assert follows(grammar, "<t></t>1/")
    assert not follows(grammar, "<t>a</t>b</t>1/"), "what follows the first end is no text"
    assert not follows(grammar, "<t>a<t></t>1/")
    assert not follows(grammar, "<t>a</t>")
