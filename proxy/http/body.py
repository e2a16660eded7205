"""JSON bodies into pydantic models, with every fault as InvalidRequest that names its field."""

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
_SHOWN_ERRORS = 5
_PLAINER = {
    "extra_forbidden": "there is no such field",
    "model_type": "a JSON object is expected",
    "model_attributes_type": "a JSON object is expected",
}


MOST_BYTES = 4 << 20
MOST_VALUES = 100_000
"""Of a JSON body that is no model call: a thousand rewards with their comments. To decode so many values takes some
hundredths of a second, in which no other request is answered."""
_INLINE_BYTES = 1 << 17
"""A longer body is decoded on a thread: it would keep others waiting for more than a millisecond or two."""


async def json_body(request: Request) -> Any:
    """The body as JSON, whatever its content type; None for an empty one. Raises InvalidRequest, PayloadTooLarge."""
    body = await request.body()
    if len(body) > MOST_BYTES:
        raise PayloadTooLarge(f"this endpoint takes {MOST_BYTES} bytes at most, and these are {len(body)}")
    return await asyncio.to_thread(_decoded, body) if len(body) > _INLINE_BYTES else _decoded(body)


def _decoded(body: bytes) -> Any:
    if not body.strip():
        return None
    if has_more_values(body, MOST_VALUES):
        raise InvalidRequest(f"the body has more than {MOST_VALUES} JSON values: send it in several requests")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def validated(model: type[_Model], value: Any, *, within: str = "") -> _Model:
    """`value` as a model. `within` is where in the body it stands. Raises InvalidRequest."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False), within) from error


def invalid(errors: Sequence[Any], within: str = "") -> InvalidRequest:
    """Validation errors, in pydantic's form, as one error; `param` is the first field."""
    lines = []
    for error in errors[:_SHOWN_ERRORS]:
        path = field_path(error["loc"], within)
        message = _PLAINER.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{path}: {message}" if path else message)
    return InvalidRequest("; ".join(lines), param=field_path(errors[0]["loc"], within) or None)


def field_path(location: Sequence[int | str], within: str = "") -> str:
    """('messages', 0, 'content') as `messages[0].content`."""
    path = within
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
