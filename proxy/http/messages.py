"""Read and write the MessagePack bodies of the contract between proxy and trainer."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from proxy.contract.claim import MEDIA_TYPE, decode, encode
from proxy.errors import InvalidRequest

_Message = TypeVar("_Message")


async def message_body(request: Request, kind: type[_Message]) -> _Message:
    """Decode the body as a contract message, whatever its content type. Raise InvalidRequest."""
    body = await request.body()
    try:
        return decode(body, kind)
    except msgspec.ValidationError as error:
        _, _, path = str(error).partition(" - at ")
        raise InvalidRequest(f"the body is not a {kind.__name__}: {error}", param=_param(path) or None) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid MessagePack: {error}") from error


def message_response(message: Any) -> Response:
    return Response(encode(message), media_type=MEDIA_TYPE)


def _param(path: str) -> str:
    """Return the field of a path in msgspec's form: `weights.bytes` for "`$.weights.bytes`"."""
    return path.strip("`").removeprefix("$").removeprefix(".")
