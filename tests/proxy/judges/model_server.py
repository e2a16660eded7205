"""A real OpenAI-compatible server on loopback, whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tests.proxy.overview.serving import serving_app

Answer = str | Response | Callable[[dict[str, Any]], Awaitable[str | Response]]


class ModelServer:
    """`answers` are given in order, the last one for ever; `requests` and `keys` are what arrived."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [grade(0.5)]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        given = await answer(body) if callable(answer) and not isinstance(answer, Response) else answer
        return given if isinstance(given, Response) else completion(given)


def grade(score: Any, rationale: str = "because") -> str:
    return json.dumps({"rationale": rationale, "score": score})


def completion(text: str, finish_reason: str = "stop") -> Response:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return JSONResponse({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage})


def refusal(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status, headers)


async def silence(_body: dict[str, Any]) -> str:
    """Answer long after every bound."""
    await asyncio.sleep(1)
    return ""


@asynccontextmanager
async def serving_model() -> AsyncIterator[ModelServer]:
    model = ModelServer()
    app = FastAPI()
    for path in ("/v1/chat/completions", "/v1/v1/messages"):  # the second is litellm's for Anthropic
        app.add_api_route(path, model.answer, methods=["POST"], response_model=None)
    async with serving_app(app) as address:
        model.url = f"{address}/v1"
        yield model
