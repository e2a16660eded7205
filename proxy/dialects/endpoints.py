"""OpenAI's endpoints for chat, completions and models, and the part of a call that all dialects share.

Each endpoint is there with and without `/v1`, and under a session's own address.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from proxy.auth.http import principal
from proxy.calls.call import Answer, Caller, Dialect, ModelCall, StreamHead
from proxy.calls.generation import Generation
from proxy.calls.runtime import RunModel
from proxy.calls.service import CallService
from proxy.dialects.chat.dialect import ChatCompletions
from proxy.dialects.chat.request import ChatCompletionBody, parse_chat_completion
from proxy.dialects.completions.dialect import Completions
from proxy.dialects.completions.request import CompletionBody, parse_completion
from proxy.dialects.listing import ListedModel
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

# Clients and gateways bound the size of all headers together, mostly by 8 KB.
_LONGEST_WARNING = 1000

# No client counts further, and Python refuses to read numbers of thousands of digits.
_RETRY_DIGITS = 9

_CHAT = ChatCompletions()
_COMPLETIONS = Completions()


def calls_of(request: Request) -> CallService:
    return service(request, CallService)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    calls, who, body = calls_of(request), await caller(request), await request.body()
    model = await calls.model_of(who.principal, body)
    parse = partial(
        parse_chat_completion, known=model.runtime.template_arguments, memory=calls.remembered, bounds=calls.bounds
    )
    call = await calls.read(body, parse, model.runtime)
    return await answer(request, call, who, model, _CHAT)


async def completions(request: Request) -> Response:
    """Continue texts or token ids, streamed or whole."""
    calls, who, body = calls_of(request), await caller(request), await request.body()
    model = await calls.model_of(who.principal, body)
    parse = partial(parse_completion, text_of=model.runtime.decoder.text, bounds=calls.bounds)
    call = await calls.read(body, parse, model.runtime, prompt_ids=True)
    return await answer(request, call, who, model, _COMPLETIONS)


async def list_models(request: Request) -> Response:
    """List the models that the key can ask for; in Anthropic's form for Anthropic's clients."""
    models = await _models(request)
    if messages_models.HEADER in request.headers:
        return json_response(messages_models.page(models, request.query_params))
    return json_response({"object": "list", "data": [model.entry for model in models]})


async def get_model(request: Request, model: str) -> Response:
    """Describe one of the models that the key can ask for."""
    for known in await _models(request):
        if known.name == model:
            is_anthropic = messages_models.HEADER in request.headers
            return json_response(messages_models.model_info(known) if is_anthropic else known.entry)
    raise ModelNotFound(f"there is no model {model!r} for this key", param="model")


async def _models(request: Request) -> list[ListedModel]:
    calls, who = calls_of(request), await principal(request)
    runs = await calls.models.visible_to(who)
    if who.run_id is not None:
        # Anthropic's form lists the context length. An admin's listing must not load the models of all runs.
        for run in runs:
            await calls.runtimes.of(run)
    return [
        ListedModel(name=name, created=int(run.created_at), context_length=calls.runtimes.context_length(run))
        for run in runs
        for name in calls.models.names_of(run)
    ]


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
    """Return who sends the request, and what its headers and path say of its session. Raise AuthenticationFailed."""
    headers = dict(reversed(request.scope["headers"]))  # reversed: the first of several headers with one name counts
    retries = headers.get(b"x-stainless-retry-count", b"")
    retry_count = int(retries) if retries.isdigit() and len(retries) <= _RETRY_DIGITS else None
    given = headers.get(b"idempotency-key")
    idempotency_key = given.decode("latin-1") if given is not None else None
    # Hashing a body takes time, so it is done only for clients that may repeat the request.
    is_repeatable = retry_count is not None or idempotency_key is not None
    return Caller(
        principal=await principal(request),
        path_session=request.scope["path_params"].get("session_id"),
        session_headers=session_headers(request.scope["headers"]),
        idempotency_key=idempotency_key,
        retry_count=retry_count,
        body_digest=await calls_of(request).digest(await request.body()) if is_repeatable else b"",
    )


async def answer(request: Request, call: ModelCall, who: Caller, model: RunModel, dialect: Dialect) -> Response:
    """Answer a parsed call, in the same way for every dialect."""
    calls = calls_of(request)
    call = await calls.adapt(call, model)
    begun = await calls.begin(call, who, model, dialect)
    if not isinstance(begun, Generation):
        recorded = begun.answer
        headers = _headers(call, recorded)
        if not call.stream:
            return json_response(dialect.response(call, recorded), headers)
        writer = dialect.stream(call, head_of(recorded))
        return Response(whole_stream(writer, recorded), 200, headers, EventStream.media_type)
    headers = {**_headers(call, begun.head), **limit_headers(begun.head.standings)}
    if not call.stream:
        return await whole_answer(request, begun, call, dialect, headers)
    return EventStream(
        begun,
        dialect.stream(call, begun.head),
        headers=headers,
        ping_seconds=service(request, Settings).server.stream_ping_seconds,
        follows=begun.call is not call,
    )


def _headers(call: ModelCall, known: Answer | StreamHead) -> dict[str, str]:
    """Return the headers that name the session and turn for rewards, or say why there are none; and the warnings."""
    headers = unrecorded_header(known) or {"x-base-rl-session": known.session_id, "x-base-rl-turn": known.turn_id}
    if known.attempt is not None:
        headers["x-base-rl-attempt"] = str(known.attempt)
    return headers | warning_header((*call.warnings, *known.warnings))


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header that carries the warnings; none if there are none."""
    if not warnings:
        return {}
    text = "; ".join(warnings)
    if len(text) > _LONGEST_WARNING:
        text = f"{text[:_LONGEST_WARNING]}..."
    return {"x-base-rl-warning": text}
