"""Read the form that OpenAI's dialects can require of an answer's text."""

from __future__ import annotations

from typing import Any

from proxy.calls.call import AnswerFormat
from proxy.dialects.fields import object_at, text_at
from proxy.errors import InvalidRequest


def read_answer_format(form: Any, where: str, nested: str | None = None) -> AnswerFormat | None:
    """Return the required form, None for plain text. `where` is the place of `form` in the body.

    `nested` is the field of `form` that describes a JSON schema, if `form` does not describe it itself.
    Raise InvalidRequest if the form is invalid.
    """
    if form is None:
        return None
    kind = text_at(object_at(form, where).get("type"), f"{where}.type")
    if kind == "text":
        return None
    if kind == "json_object":  # any object: there is no schema to enforce
        return AnswerFormat(where=where)
    if kind != "json_schema":
        raise InvalidRequest(f"{where}.type must be text, json_object or json_schema", param=f"{where}.type")
    if nested is not None:
        form, where = form.get(nested), f"{where}.{nested}"
    described = object_at(form, where)
    name, schema, strict = described.get("name"), described.get("schema"), described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    if schema is None and nested is not None:
        schema = {}  # optional in OpenAI's chat completions, required in its Responses API
    return AnswerFormat(
        where=where,
        schema=object_at(schema, f"{where}.schema"),
        name=text_at(name, f"{where}.name") if name is not None else None,
        strict=bool(strict),
    )
