"""Decode JSON bodies and validate them with pydantic models. Errors are InvalidRequest and name the field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from proxy.errors import InvalidRequest, PayloadTooLarge
from proxy.http.json_size import has_more_values

_Model = TypeVar("_Model", bound=BaseModel)
_SHOWN_ERRORS = 5  # of a list with thousands of invalid elements, the first few tell enough
_PLAIN_MESSAGES = {
    "extra_forbidden": "there is no such field",
    "model_type": "a JSON object is expected",
    "model_attributes_type": "a JSON object is expected",
}


# Bounds on a JSON body that is not a model call. They fit a thousand rewards with comments. Decoding this many values
# holds the interpreter's lock for some hundredths of a second, in which no other request is answered.
MOST_BYTES = 4 << 20
MOST_VALUES = 100_000

# Longer bodies are decoded on a thread: on the event loop they would delay others by more than one or two ms.
_INLINE_BYTES = 1 << 17


async def json_body(request: Request) -> Any:
    """Return the body's JSON value, whatever its content type; None for an empty body.

    Raise InvalidRequest if the body is not valid JSON or has too many values, PayloadTooLarge if it is too long.
    """
    body = await request.body()
    if len(body) > MOST_BYTES:
        raise PayloadTooLarge(f"this endpoint accepts at most {MOST_BYTES} bytes, and the body has {len(body)}")
    return await asyncio.to_thread(_decode, body) if len(body) > _INLINE_BYTES else _decode(body)


def _decode(body: bytes) -> Any:
    if not body.strip():
        return None
    if has_more_values(body, MOST_VALUES):
        raise InvalidRequest(f"the body has more than {MOST_VALUES} JSON values: send it in several requests")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def validated(model: type[_Model], value: Any, *, within: str = "") -> _Model:
    """Validate `value`, found at `within` in the body, and return the model. Raise InvalidRequest."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False), within) from error


def invalid(errors: Sequence[Any], within: str = "") -> InvalidRequest:
    """Return one error for several in pydantic's form. Its `param` is the field of the first."""
    lines = []
    for error in errors[:_SHOWN_ERRORS]:
        path = field_path(error["loc"], within)
        message = _PLAIN_MESSAGES.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{path}: {message}" if path else message)
    return InvalidRequest("; ".join(lines), param=field_path(errors[0]["loc"], within) or None)


def field_path(location: Sequence[int | str], within: str = "") -> str:
    """Return the path of a pydantic location: `messages[0].content` for ('messages', 0, 'content')."""
    path = within
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
