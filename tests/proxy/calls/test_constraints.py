"""Random walks over the tokens that constraints allow: every result satisfies the constraint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from proxy.calls.call import AnswerFormat, ModelCall, RequestedSampling, ToolChoice, ToolUse
from proxy.calls.constraints import AnswerConstraints
from proxy.contract.turn import Constraint, ConstraintKind
from proxy.engines.grammars import constraint_for
from proxy.errors import UnsupportedParameter
from proxy.tokens.formats import ToolCall
from proxy.tokens.output import OutputFormat, output_format
from proxy.tokens.reasoning import Reasoning
from tests.proxy.tokens.families import FAMILIES, load

STEPS = 3000
THOUGHT = 20
CHECKS = jsonschema.Draft202012Validator.FORMAT_CHECKER

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 6}, "done": {"type": "boolean"}},
    "required": ["text", "done"],
    "additionalProperties": False,
}


def function(name: str, schema: dict[str, Any] | None, *, strict: bool = False) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, "strict": strict}
    if schema is not None:
        described["parameters"] = schema
    return {"type": "function", "function": described}


WEATHER = [function("weather", CITY, strict=True), function("note", NOTE, strict=True)]


def call(**asked: Any) -> ModelCall:
    return ModelCall(model="m", messages=[], sampling=RequestedSampling(), body={}, **asked)


@cache
def constraints(family: str) -> tuple[AnswerConstraints, OutputFormat, bool]:
    """Constraints of a family, and whether its prompts end inside a thought."""
    template = load(family)
    output = output_format(template)
    prompt = template.render([{"role": "user", "content": "x"}], None, generation_prompt=True)
    return AnswerConstraints(template), output, output.opens_reasoning(prompt)


def constraint_of(family: str, asked: ModelCall) -> Constraint | None:
    written, output, in_reasoning = constraints(family)
    promised = written.of(asked, output)
    return promised.constraint(in_reasoning=in_reasoning) if promised is not None else None


@cache
def tokenizer_of(family: str) -> llguidance.LLTokenizer:
    template = load(family)
    return llguidance.LLTokenizer(
        template.tokenizer.to_str(), n_vocab=template.vocabulary_size, eos_token=list(template.stop_ids)
    )


def matcher_of(family: str, constraint: Constraint) -> llguidance.LLMatcher:
    read = constraint_for(constraint, "llguidance")
    assert read.kind is ConstraintKind.EBNF
    matcher = llguidance.LLMatcher(tokenizer_of(family), llguidance.grammar_from("ebnf", read.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


Weights = Mapping[int, float]
"""Weights of tokens that should be more frequent than others, which have 1."""


class Endless(AssertionError):
    """Free text that did not end by chance: it shows nothing about the constraint."""


def walk(family: str, asked: ModelCall, seed: int, weights: Weights | None = None) -> str:
    """Return the text of tokens drawn at random from those that the constraint allows, up to its end. A thought is
    ended as soon as it may be, because its end tag would hardly be spelled by chance."""
    constraint = constraint_of(family, asked)
    assert constraint is not None
    template, matcher = load(family), matcher_of(family, constraint)
    draw = random.Random(seed)
    ids: list[int] = []
    closing = list(template.encode("</think>"))
    for step in range(STEPS):
        if step % THOUGHT == THOUGHT - 1 and matcher.validate_tokens(closing) == len(closing):
            ids += closing
            matcher.consume_tokens(closing)
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8).nonzero()[0].tolist()
        assert not matcher.is_error(), matcher.get_error()
        token = draw.choices(allowed, [weights.get(each, 1.0) for each in allowed] if weights else None)[0]
        if token in template.stop_ids:
            return template.tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
        assert matcher.consume_token(token), matcher.get_error()
    raise Endless(f"no end after {STEPS} tokens: {template.tokenizer.decode(ids)[-200:]!r}")


def read(family: str, asked: ModelCall, text: str) -> tuple[str, list[ToolCall], str]:
    """Return text, calls and thought of an answer, as the proxy parses it."""
    _, output, in_reasoning = constraints(family)
    parser = output.start(calls_allowed=asked.calls_allowed, in_reasoning=in_reasoning, tools=asked.tools)
    events = parser.feed(text) + parser.finish()
    return (
        "".join(event for event in events if isinstance(event, str)),
        [event for event in events if isinstance(event, ToolCall)],
        "".join(event.text for event in events if isinstance(event, Reasoning)),
    )


@cache
def ends_soon(family: str) -> Weights:
    """Prefer tokens that end thoughts, texts and answers, so that walks through free text end."""
    template = load(family)
    letters = dict.fromkeys(template.encode("</think>\n\n"), 8.0)
    return letters | dict.fromkeys([*template.stop_ids, *template.added_ids(("</think>",))], 60.0)


@cache
def closes(family: str) -> Weights:
    """Prefer tokens that end strings, lists and objects."""
    return {token: 100.0 for text in ("}", '"', "]") for token in load(family).encode(text)}


# Schemas

LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-50, 0), st.integers(0, 2000)).map(
        lambda bounds: {"type": "integer", "minimum": bounds[0], "exclusiveMaximum": bounds[1] + 1}
    ),
    st.sampled_from([0.5, -3.25, 10]).map(lambda least: {"type": "number", "minimum": least, "maximum": least + 5}),
    st.just({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
    st.lists(
        st.sampled_from(["a", "é\n", 'say "no"', "<tool_call>", "<|im_end|>", 3, None, True]), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
    st.just({"const": {"deep": [1, None, "x"]}}),
    st.tuples(st.integers(0, 2), st.integers(2, 5)).map(
        lambda bounds: {"type": "string", "minLength": bounds[0], "maxLength": bounds[1]}
    ),
    st.sampled_from(["^[a-c]{2,3}$", "^x?y+z$", "^(on|off)/[0-9]$"]).map(
        lambda text: {"type": "string", "pattern": text}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    st.just({"$ref": "#/$defs/leaf"}),
    st.just({"$ref": "#/$defs/tree"}),
)
NAMES = st.sampled_from(["a", "b", "c d", "é", 'q"', "ref", "</parameter>"])


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(st.dictionaries(NAMES, inner, max_size=4), st.randoms(use_true_random=False)).map(
        lambda drawn: {
            "type": "object",
            "properties": drawn[0],
            "required": [name for name in drawn[0] if drawn[1].random() < 0.6],
            "additionalProperties": False,
        }
    )


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 1), st.integers(1, 3)).map(
            lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
        inner.map(lambda first: {"type": "array", "prefixItems": [first], "items": False}),
    ),
    max_leaves=6,
)
DEFINITIONS = {
    "leaf": {"type": "string", "maxLength": 3, "description": "a text"},
    "tree": {
        "type": "object",
        "properties": {"name": {"enum": ["n"]}, "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
        "required": ["name", "left"],
        "additionalProperties": False,
    },
}
SCHEMAS = objects(VALUES).map(lambda schema: {**schema, "$defs": DEFINITIONS, "title": "Thing", "$comment": "x"})


@given(SCHEMAS, st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_answers_in_a_schema_validate(schema: dict[str, Any], seed: int, strict: bool) -> None:
    text = walk("hermes", call(answer_format=AnswerFormat(schema=schema, name="thing", strict=strict)), seed)
    jsonschema.validate(json.loads(text), schema, format_checker=CHECKS)


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_any_json_object_is_an_object(seed: int) -> None:
    text = walk("hermes", call(answer_format=AnswerFormat()), seed, closes("hermes"))
    assert isinstance(json.loads(text), dict)


def without_xml_traps(schema: dict[str, Any]) -> bool:
    """XML arguments cannot carry every value; those are refused."""
    try:
        constraint_of("qwen3_coder", call(tools=[function("f", schema, strict=True)]))
    except UnsupportedParameter:
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data(), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_a_required_call_is_a_call_of_a_tool_with_its_arguments(family: str, data: st.DataObject, seed: int) -> None:
    schemas = SCHEMAS.filter(without_xml_traps) if FAMILIES[family].tool_format == "qwen3_coder" else SCHEMAS
    by_name = {"first": data.draw(schemas), "second-1": CITY}
    asked = call(
        tools=[function(name, schema, strict=True) for name, schema in by_name.items()],
        tool_choice=ToolChoice(use=ToolUse.REQUIRED),
        parallel_calls=data.draw(st.booleans()),
    )
    try:
        written = walk(family, asked, seed, ends_soon(family) if FAMILIES[family].reasoning else None)
    except Endless:
        reject()
    text, calls, _ = read(family, asked, written)
    assert not text.strip(), written
    assert calls, written
    for made in calls:
        jsonschema.validate(json.loads(made.arguments), by_name[made.name], format_checker=CHECKS)
    if not asked.parallel_calls or load(family).single_calls:
        assert len(calls) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_function_is_the_one_that_is_called(family: str) -> None:
    asked = call(tools=WEATHER, tool_choice=ToolChoice(use=ToolUse.REQUIRED, name="note"), parallel_calls=False)
    for seed in range(4):
        weigh = ends_soon(family) if FAMILIES[family].reasoning else None
        _, calls, _ = read(family, asked, walk(family, asked, seed, weigh))
        assert [made.name for made in calls] == ["note"]
        jsonschema.validate(json.loads(calls[0].arguments), NOTE)


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_leave_text_free_and_hold_every_call(family: str) -> None:
    """Markers have a high weight, so that calls occur; everything that begins like a call is one."""
    template = load(family)
    likes = [*template.encode("<tool_call>"), *template.encode("[TOOL_CALLS]"), *template.encode("{")]
    weigh = {**ends_soon(family), **dict.fromkeys(likes, 60.0)}
    asked = call(tools=WEATHER)
    made, texts = [], []
    for seed in range(30):
        text, calls, _ = read(family, asked, walk(family, asked, seed, weigh))
        made += calls
        texts.append(text)
    assert made
    for each in made:
        jsonschema.validate(json.loads(each.arguments), CITY if each.name == "weather" else NOTE)
    assert any(text.strip() for text in texts)
    assert all("<tool_call>" not in text and "[TOOL_CALLS]" not in text for text in texts), "all calls were read"


@pytest.mark.parametrize("family", FAMILIES)
def test_beside_an_answer_in_a_schema_calls_may_come(family: str) -> None:
    tools = [function("weather", CITY), function("note", None)]
    asked = call(tools=tools, answer_format=AnswerFormat(schema=NOTE, strict=True))
    seen = set()
    for seed in range(16):
        weigh = ends_soon(family) if FAMILIES[family].reasoning else None
        text, calls, _ = read(family, asked, walk(family, asked, seed, weigh))
        assert bool(calls) != bool(text.strip())
        if not calls:
            jsonschema.validate(json.loads(text), NOTE)
        for made in calls:
            jsonschema.validate(json.loads(made.arguments), CITY if made.name == "weather" else {"maxProperties": 0})
        seen.add(bool(calls))
    assert seen == {True, False}


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.reasoning])
def test_thinking_comes_before_the_constrained_answer(family: str) -> None:
    thoughts = []
    for seed in range(12):
        asked = call(answer_format=AnswerFormat(schema=CITY))
        text, _, thought = read(family, asked, walk(family, asked, seed, ends_soon(family)))
        jsonschema.validate(json.loads(text), CITY)
        thoughts.append(thought)
    assert any(thoughts)


def test_without_a_constraint_nothing_is_constrained() -> None:
    for asked in (
        call(),
        call(tools=[function("f", CITY)]),
        call(tools=WEATHER, tool_choice=ToolChoice(use=ToolUse.NONE)),
        call(tools=None, tool_choice=ToolChoice()),
    ):
        assert constraint_of("hermes", asked) is None


def test_a_plain_schema_is_given_as_it_is() -> None:
    assert constraint_of("hermes", call(answer_format=AnswerFormat(schema=CITY))) == Constraint(
        kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(CITY)
    )


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "properties.a.not"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "items.uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "format": "phone"}]}, "anyOf.1.format"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        ({"properties": {"a": 3}}, "properties.a"),
        ({"properties": []}, "properties"),
        ({"items": [{"type": "null"}]}, "items"),
        ({"anyOf": []}, "anyOf"),
        ({"required": "a"}, "required"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    where = "response_format.json_schema.schema"
    with pytest.raises(UnsupportedParameter) as refused:
        constraint_of("hermes", call(answer_format=AnswerFormat(schema=schema)))
    assert refused.value.param == f"{where}.{place}"
    with pytest.raises(UnsupportedParameter) as refused:
        constraint_of("hermes", call(tools=[function("g", None), function("f", schema, strict=True)]))
    assert refused.value.param == f"tools[1].function.parameters.{place}"


def deep(levels: int) -> dict[str, Any]:
    links = {f"a{index}": {"properties": {"x": {"$ref": f"#/$defs/a{index + 1}"}}} for index in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{levels}": {"type": "null"}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [deep(1000), nested(1000), {"enum": ["x" * 100] * 12_000}, {"anyOf": [{"type": "null"}] * 11_000}],
    ids=["references", "nesting", "size", "number"],
)
def test_schemas_beyond_any_use_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match="more than"):
        constraint_of("hermes", call(answer_format=AnswerFormat(schema=schema)))
    asked = call(tools=[function("f", schema)], tool_choice=ToolChoice(use=ToolUse.REQUIRED))
    assert constraint_of("hermes", asked) is not None, "of a function that is not strict what can be is kept"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (
            call(answer_format=AnswerFormat(schema={"type": "array"}, strict=True)),
            "response_format.json_schema.schema",
        ),
        (call(answer_format=AnswerFormat(schema=CITY, name="a b")), "response_format.json_schema.name"),
        (call(tools=[function("f", {"type": "string"}, strict=True)]), "tools[0].function.parameters"),
        (call(tools=[function("a.b", CITY, strict=True)]), "tools[0].function.name"),
        (call(answer_format=AnswerFormat(schema=CITY), prefill="{"), "messages"),
        (
            call(answer_format=AnswerFormat(where="text.format", schema={"not": {}})),
            "text.format.schema.not",
        ),
    ],
)
def test_rules_of_strict_mode(asked: ModelCall, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        constraint_of("hermes", asked)
    assert refused.value.param == param


def test_a_call_cannot_be_required_of_a_model_that_writes_none() -> None:
    written, _, _ = constraints("hermes")
    required = call(tools=WEATHER, tool_choice=ToolChoice(use=ToolUse.REQUIRED))
    with pytest.raises(UnsupportedParameter) as refused:
        written.of(required, OutputFormat())
    assert refused.value.param == "tool_choice"
    assert written.of(call(tools=WEATHER), OutputFormat()) is None


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(seed: int) -> None:
    loose = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "not": {"const": 3}, "minimum": 2, "maximum": 4},
            "s": {"type": "string", "format": "binary", "pattern": "(?=a)b", "maxLength": 2},
            "o": {"oneOf": [{"const": 1}, {"const": 2}]},
        },
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    held = {
        "type": "object",
        "properties": {"n": {"enum": [2, 3, 4]}, "s": {"type": "string", "maxLength": 2}, "o": {}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }

    asked = call(tools=[function("f", loose)], tool_choice=ToolChoice(use=ToolUse.REQUIRED), parallel_calls=False)
    _, (made,), _ = read("hermes", asked, walk("hermes", asked, seed, closes("hermes")))
    jsonschema.validate(json.loads(made.arguments), held)
