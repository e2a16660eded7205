"""Write a constraint in the form that an engine's grammar back end reads."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import msgspec

from proxy.contract.turn import Constraint, ConstraintKind
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.grammars.nodes import MOST_WHITESPACE
from proxy.grammars.schemas import SchemaRefused, check_for_xgrammar
from proxy.grammars.structural_tag import LARK_HEAD, StructuralTagUnsupported, in_slashes, lark_of, with_whitespace

# Translated constraints to remember, because agents send the same tools with every call.
_REMEMBERED = 64

ENFORCED = {
    "llguidance": frozenset(ConstraintKind),
    "xgrammar": frozenset(ConstraintKind),
    "outlines": frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX}),
}
"""The constraints that each of SGLang's grammar back ends enforces. The embedded engine has llguidance."""


def constraint_for(constraint: Constraint, backend: str | None) -> Constraint:
    """Return the constraint in the form that the back end reads.

    Raises UnsupportedParameter if the back end cannot enforce it or the engine has none, InvalidRequest if it is
    malformed.
    """
    kind = constraint.kind
    if kind not in ENFORCED.get(backend or "", ()):
        how = f"whose grammar back end is {backend}" if backend in ENFORCED else "without a grammar back end"
        raise UnsupportedParameter(
            f"this needs constrained decoding ({kind.value}), which the engine, {how}, does not enforce"
        )
    try:
        if backend == "llguidance":
            return _for_llguidance(constraint)
        if backend == "xgrammar":
            _check_for_xgrammar(constraint)
    except SchemaRefused as error:
        raise UnsupportedParameter(f"the schema cannot be enforced: {error}") from error
    except StructuralTagUnsupported as error:
        raise UnsupportedParameter(f"the structural tag cannot be enforced: {error}") from error
    return constraint


# Only for llguidance, whose form has to be written anew; XGrammar reads the constraint as it is.
@lru_cache(maxsize=_REMEMBERED)
def _for_llguidance(constraint: Constraint) -> Constraint:
    """Return the constraint as a grammar: the options in `LARK_HEAD` exist only there."""
    kind, text = constraint.kind, constraint.text
    if kind is ConstraintKind.JSON_SCHEMA:
        schema = json.dumps(with_whitespace(_decoded(text), MOST_WHITESPACE), ensure_ascii=False)
        return Constraint(kind=ConstraintKind.EBNF, text=f"{LARK_HEAD}\nstart: %json {schema}")
    if kind is ConstraintKind.REGEX:
        return Constraint(kind=ConstraintKind.EBNF, text=f"{LARK_HEAD}\nstart: /{in_slashes(text)}/")
    if kind is ConstraintKind.STRUCTURAL_TAG and "format" in _decoded(text):
        return Constraint(kind=ConstraintKind.EBNF, text=lark_of(text))
    return constraint


def _check_for_xgrammar(constraint: Constraint) -> None:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        check_for_xgrammar(_decoded(constraint.text))
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        waiting: list[Any] = [_decoded(constraint.text).get("format")]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                if isinstance(node.get("json_schema"), dict):
                    check_for_xgrammar(node["json_schema"])
                waiting += [node.get(key) for key in ("content", "elements", "tags")]


def _decoded(text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the constraint is not a JSON object: {error}") from error
    return value
