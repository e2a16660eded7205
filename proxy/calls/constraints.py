"""Turn `response_format`, `tool_choice` and strict tools into the one constraint of a call's answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.calls.call import AnswerFormat, ModelCall, ToolUse
from proxy.contract.turn import Constraint, ConstraintKind
from proxy.errors import UnsupportedParameter
from proxy.grammars.nodes import Node, any_text, either, json_value, optional, regex, sequence, tag
from proxy.grammars.schemas import FORMATS, UNENFORCED, SchemaRefused, check_schema, referenced
from proxy.grammars.structural_tag import structural_tag
from proxy.tokens import reasoning
from proxy.tokens.formats import AllowedCall
from proxy.tokens.output import OutputFormat
from proxy.tokens.template import ChatTemplate

MOST_CHARACTERS = 1 << 20
"""The longest constraint that engines accept."""

_BRACKETED = re.compile("<.*>", re.DOTALL)
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_NOT_ENFORCED = UNENFORCED | {"pattern", "multipleOf"}
_ANY_VALUE = {"allOf", "oneOf", "patternProperties"}


class PromisedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a call's answer after the model's reasoning. `where` is the place in the request that asks for it;
    `tokens` are the markers that are tokens of the model."""

    content: Node
    where: str
    thinks: bool
    tokens: Mapping[str, int]

    def constraint(self, *, in_reasoning: bool) -> Constraint:
        """Return the constraint for the engine. `in_reasoning`: the prompt ends inside of a thought.

        Raise UnsupportedParameter for a constraint that is too long.
        """
        content = sequence(_thought(opened=in_reasoning), self.content) if self.thinks else self.content
        if content["type"] == "json_schema":
            kind, written = ConstraintKind.JSON_SCHEMA, json.dumps(content["json_schema"], ensure_ascii=False)
        else:
            kind, written = ConstraintKind.STRUCTURAL_TAG, structural_tag(content, self.tokens)
        if len(written) > MOST_CHARACTERS:
            raise UnsupportedParameter(
                f"the schemas have more than {MOST_CHARACTERS} characters together, more than can be enforced",
                param=self.where,
            )
        return Constraint(kind=kind, text=written)


def place_of(call: ModelCall) -> str:
    """Return the place in the request that asks for the form of the answer, to name it when an engine refuses the
    form."""
    if call.answer_format is not None:
        return call.answer_format.where
    return "tool_choice" if call.tool_choice.use is ToolUse.REQUIRED else "tools"


class AnswerConstraints:
    """The constraints of one model, by the template's way to write calls and the markers that are tokens."""

    def __init__(self, template: ChatTemplate) -> None:
        added = template.tokenizer.get_added_tokens_decoder().items()
        # The tokens that llguidance treats as special; it matches others as text.
        self._tokens = {
            entry.content: token for token, entry in added if entry.special or _BRACKETED.fullmatch(entry.content)
        }
        self._single_calls = template.single_calls

    def of(self, call: ModelCall, output: OutputFormat) -> PromisedAnswer | None:
        """Return the form that the call's answer must have; None if it may have any.

        Raise UnsupportedParameter, with the place and the reason, for a form that cannot be enforced.
        """
        content = self._answer(call, output)
        if content is None:
            return None
        if call.prefill:
            raise UnsupportedParameter(
                "an answer that the request begins cannot be held to a form: the model goes on from the middle of it",
                param="messages",
            )
        tokens = {text: self._tokens[text] for text in output.kept_texts if text in self._tokens}
        return PromisedAnswer(content=content, where=place_of(call), thinks=output.reasoning, tokens=tokens)

    def _answer(self, call: ModelCall, output: OutputFormat) -> Node | None:
        form = json_value(_answer_schema(call.answer_format)) if call.answer_format is not None else None
        required = call.tool_choice.use is ToolUse.REQUIRED
        if not (call.calls_allowed and (form is not None or required or _any_strict(call))):
            return form
        if output.tool_format is None:
            if required:
                raise UnsupportedParameter(
                    "a call cannot be required of this model: its chat template writes none that is known here",
                    param="tool_choice",
                )
            return form
        calls, parallel = _allowed_calls(call), call.parallel_calls and not self._single_calls
        try:
            if required:
                return output.tool_format.only_calls(calls, parallel=parallel)
            if form is not None:
                return either(output.tool_format.only_calls(calls, parallel=parallel), form)
            excludes = (reasoning.OPEN, reasoning.CLOSE) if output.reasoning else ()
            return output.tool_format.text_or_calls(calls, parallel=parallel, excludes=excludes)
        except SchemaRefused as error:
            raise UnsupportedParameter(f"a tool's calls cannot be enforced: {error}", param="tools") from error


def _thought(*, opened: bool) -> Node:
    """Return the format of the reasoning before an answer. It is optional unless the prompt has opened it."""
    begin = "" if opened else reasoning.OPEN
    thought = sequence(
        tag(begin, any_text(reasoning.OPEN, reasoning.CLOSE), reasoning.CLOSE),
        regex(r"\n{0,2}"),
    )
    return thought if opened else optional(thought)


def _answer_schema(form: AnswerFormat) -> dict[str, Any]:
    if form.schema is None:
        return _ANY_OBJECT
    where = f"{form.where}.schema"
    if form.name is not None and not _NAME.fullmatch(form.name):
        raise UnsupportedParameter(
            "a schema's name has letters, digits, _ and -, at most 64 of them", param=f"{form.where}.name"
        )
    try:
        check_schema(form.schema)
    except SchemaRefused as error:
        raise UnsupportedParameter(error.reason, param=".".join((where, *error.place))) from error
    if form.strict and not _is_object(form.schema):
        raise UnsupportedParameter("a strict schema is that of an object (type: object)", param=where)
    return form.schema


def _any_strict(call: ModelCall) -> bool:
    return any(tool["function"].get("strict") for tool in call.tools or ())


def _allowed_calls(call: ModelCall) -> list[AllowedCall]:
    """Return the functions that may be called: the one that `tool_choice` names, or all."""
    calls = []
    for index, tool in enumerate(call.tools or ()):
        function = tool["function"]
        if call.tool_choice.name in (None, function["name"]):
            place = call.tool_places.get(function["name"], f"tools[{index}].function")
            calls.append(_allowed_call(function, place))
    return calls


def _allowed_call(function: Mapping[str, Any], where: str) -> AllowedCall:
    """Return a function with the schema that its calls must match: the whole schema of a strict function, and the
    part that can be enforced of any other, which promises nothing."""
    name, schema = function["name"], function.get("parameters")
    if schema is None:
        return AllowedCall(name=name, schema=_NO_ARGUMENTS, strict=False)
    if not function.get("strict"):
        return AllowedCall(name=name, schema=_enforceable(schema), strict=False)
    if not _NAME.fullmatch(name):
        raise UnsupportedParameter(
            "a strict function's name has letters, digits, _ and -, at most 64 of them", param=f"{where}.name"
        )
    try:
        check_schema(schema)
    except SchemaRefused as error:
        raise UnsupportedParameter(error.reason, param=".".join((where, "parameters", *error.place))) from error
    if not _is_object(schema):
        raise UnsupportedParameter(
            "a strict function's parameters are those of an object (type: object)", param=f"{where}.parameters"
        )
    return AllowedCall(name=name, schema=schema, strict=True)


def _is_object(schema: Mapping[str, Any]) -> bool:
    found = referenced(schema, schema["$ref"]) if "$ref" in schema else schema
    return isinstance(found, Mapping) and found.get("type") == "object"


def _enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that every engine can enforce: all values that match the schema match it."""
    try:
        enforced: dict[str, Any] = _enforced(schema)
        check_schema(enforced)
    except (SchemaRefused, RecursionError):
        return _ANY_OBJECT
    return enforced if _is_object(enforced) else _ANY_OBJECT


def _enforced(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_enforced(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.keys() & _ANY_VALUE:
        return {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    enforced = {}
    for keyword, value in schema.items():
        if keyword in _NOT_ENFORCED or (keyword == "format" and value not in FORMATS):
            continue
        if keyword in ("$defs", "definitions", "properties") and isinstance(value, dict):
            enforced[keyword] = {name: _enforced(each) for name, each in value.items()}
        elif keyword in ("items", "additionalProperties", "anyOf", "prefixItems"):
            enforced[keyword] = _enforced(value)
        else:
            enforced[keyword] = value
    return enforced
