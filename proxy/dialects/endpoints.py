"""Model endpoints: with and without `/v1`, and under a session's own address."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from proxy.auth.http import principal
from proxy.calls.call import Answer, Caller, Dialect, ModelCall, StreamHead
from proxy.calls.generation import Generation
from proxy.calls.service import ChatService
from proxy.dialects.chat.dialect import ChatCompletions
from proxy.dialects.chat.request import ChatCompletionBody, parse_chat_completion
from proxy.dialects.completions.dialect import Completions
from proxy.dialects.completions.request import CompletionBody, parse_completion
from proxy.dialects.messages import models as messages_models
from proxy.dialects.streaming import (
    EventStream,
    head_of,
    json_response,
    limit_headers,
    unrecorded_header,
    whole_answer,
    whole_stream,
)
from proxy.errors import ModelNotFound
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.sessions.identification import session_headers
from proxy.settings import Settings

router = APIRouter(tags=["models"])

PREFIXES = ("/v1", "", "/sessions/{session_id}/v1", "/sessions/{session_id}")

_LONGEST_WARNING = 1000
"""Clients and gateways bound the size of all headers together, mostly by 8 KB."""

_RETRY_DIGITS = 9
"""No client counts further; Python itself refuses to read numbers of thousands of digits."""

_CHAT = ChatCompletions()
_COMPLETIONS = Completions()


def chat_of(request: Request) -> ChatService:
    return service(request, ChatService)


async def chat_completions(request: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    who = await caller(request)
    chat = chat_of(request)
    parse = partial(parse_chat_completion, known=chat.template_arguments, bounds=chat.bounds)
    return await answer(request, await chat.read(await request.body(), parse), who, _CHAT)


async def completions(request: Request) -> Response:
    """Continues texts or token ids, streamed or whole."""
    who = await caller(request)
    chat = chat_of(request)
    parse = partial(parse_completion, text_of=chat.text_of, bounds=chat.bounds)
    call = await chat.read(await request.body(), parse, prompt_ids=True)
    return await answer(request, call, who, _COMPLETIONS)


async def list_models(request: Request) -> Response:
    """What the key can ask for; in Anthropic's form for Anthropic's clients."""
    models = await chat_of(request).models.listing(await principal(request))
    if messages_models.HEADER in request.headers:
        return json_response(messages_models.page(models, request.query_params, chat_of(request).context_length))
    return json_response({"object": "list", "data": models})


async def get_model(request: Request, model: str) -> Response:
    """One of the models that the key can ask for."""
    for known in await chat_of(request).models.listing(await principal(request)):
        if known["id"] == model:
            if messages_models.HEADER in request.headers:
                return json_response(messages_models.model_info(known, chat_of(request).context_length))
            return json_response(known)
    raise ModelNotFound(f"there is no model {model!r} for this key", param="model")


_ANSWERED = {200: "The answer; a stream of its events with `stream`."}

for _prefix in PREFIXES:
    _shown = _prefix == "/v1"
    for _path, _method, _handler, _described in (
        (
            "chat/completions",
            "POST",
            chat_completions,
            described(ChatCompletionBody, answers=_ANSWERED, may_stream=True),
        ),
        ("completions", "POST", completions, described(CompletionBody, answers=_ANSWERED, may_stream=True)),
        ("models", "GET", list_models, described(answers={200: "The models."})),
        ("models/{model:path}", "GET", get_model, described(answers={200: "The model."})),
    ):
        router.add_api_route(
            f"{_prefix}/{_path}", _handler, methods=[_method], include_in_schema=_shown, openapi_extra=_described
        )


async def caller(request: Request) -> Caller:
    """Who sends this, and what it says of its session. Raises AuthenticationFailed."""
    headers = dict(reversed(request.scope["headers"]))  # of several of a name, the first
    body = await request.body()
    retries = headers.get(b"x-stainless-retry-count", b"")
    retry_count = int(retries) if retries.isdigit() and len(retries) <= _RETRY_DIGITS else None
    given = headers.get(b"idempotency-key")
    idempotency_key = given.decode("latin-1") if given is not None else None
    is_repeatable = retry_count is not None or idempotency_key is not None
    return Caller(
        principal=await principal(request),
        path_session=request.path_params.get("session_id"),
        session_headers=session_headers(request.scope["headers"]),
        idempotency_key=idempotency_key,
        retry_count=retry_count,
        body_digest=await chat_of(request).digest(body) if is_repeatable else b"",
    )


async def answer(request: Request, call: ModelCall, who: Caller, dialect: Dialect) -> Response:
    """The way from a parsed call to its response, the same for every dialect."""
    call = await chat_of(request).honoured(call)
    started = await chat_of(request).start(call, who, dialect)
    if not isinstance(started, Generation):
        recorded = started.answer
        headers = _headers(call, recorded)
        if not call.stream:
            return json_response(dialect.response(call, recorded), headers)
        writer = dialect.stream(call, head_of(recorded))
        return Response(whole_stream(writer, recorded), 200, headers, EventStream.media_type)
    headers = {**_headers(call, started.head), **limit_headers(started.head.standings)}
    if not call.stream:
        return await whole_answer(request, started, call, dialect, headers)
    return EventStream(
        started,
        dialect.stream(call, started.head),
        headers=headers,
        ping_seconds=service(request, Settings).server.stream_ping_seconds,
        follows=started.call is not call,
    )


def _headers(call: ModelCall, known: Answer | StreamHead) -> dict[str, str]:
    """Name what rewards are sent to, or why there is nothing to send them to; warn of what had no effect."""
    headers = unrecorded_header(known) or {"x-base-rl-session": known.session_id, "x-base-rl-turn": known.turn_id}
    if known.attempt is not None:
        headers["x-base-rl-attempt"] = str(known.attempt)
    return headers | warning_header((*call.warnings, *known.warnings))


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header that names what of the request was changed or has no effect; none if there is nothing."""
    text = "; ".join(warnings)
    if len(text) > _LONGEST_WARNING:
        text = f"{text[:_LONGEST_WARNING]}..."
    return {"x-base-rl-warning": text} if text else {}
