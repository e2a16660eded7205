"""The endpoints of Anthropic's Messages API, under every prefix of the model endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from proxy.auth.http import principal
from proxy.calls.bodies import Parse
from proxy.calls.call import ModelCall
from proxy.calls.runtime import ModelRuntime
from proxy.dialects.endpoints import PREFIXES, answer, caller, calls_of, warning_header
from proxy.dialects.messages.dialect import Messages
from proxy.dialects.messages.request import CountTokensBody, MessagesBody, parse_count_tokens, parse_messages
from proxy.dialects.streaming import json_response
from proxy.errors import UnsupportedParameter
from proxy.http.anthropic import request_id_of
from proxy.http.openapi import described

router = APIRouter(tags=["models"])

_MESSAGES = Messages()


async def messages(request: Request) -> Response:
    """Answer a conversation in Anthropic's wire format, streamed or whole."""
    who = await caller(request)
    model = await calls_of(request).model_of(who.principal, await request.body())
    call = await _read(request, parse_messages, model.runtime)
    try:
        answered = await answer(request, call, who, model, _MESSAGES)
    except UnsupportedParameter as error:
        raise UnsupportedParameter(error.message, param=_place(error.param)) from error
    return _named(request, answered)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a request's prompt. Nothing is generated or recorded."""
    model = await calls_of(request).model_of(await principal(request), await request.body())
    call = await _read(request, parse_count_tokens, model.runtime)
    counted = await calls_of(request).count_tokens(call, model)
    return _named(request, json_response({"input_tokens": counted}, warning_header(call.warnings)))


for _prefix in PREFIXES:
    _shown = _prefix == "/v1"
    for _path, _handler, _described in (
        ("messages", messages, described(MessagesBody, answers={200: "The answer."}, may_stream=True)),
        ("messages/count_tokens", count_tokens, described(CountTokensBody, answers={200: "The count."})),
    ):
        router.add_api_route(
            f"{_prefix}/{_path}", _handler, methods=["POST"], include_in_schema=_shown, openapi_extra=_described
        )


async def _read(request: Request, parse: Callable[..., ModelCall], runtime: ModelRuntime) -> ModelCall:
    calls = calls_of(request)
    parse_for_model: Parse = partial(
        parse, known=runtime.template_arguments, bounds=calls.bounds, system_anywhere=runtime.system_anywhere
    )
    return await calls.read(await request.body(), parse_for_model, runtime)


def _place(param: str | None) -> str | None:
    """Return a place in a tool of chat completions, as Anthropic's API names it."""
    if param is None or not param.startswith("tools["):
        return param
    return param.replace("].function.parameters", "].input_schema", 1).replace("].function", "]", 1)


def _named(request: Request, response: Response) -> Response:
    """Return the response with the request's id in the header that Anthropic's SDKs read."""
    request_id = request_id_of(request.scope)
    if request_id is not None:
        response.headers["request-id"] = request_id
    return response
