"""A scripted base-rl in this process: the endpoints that the example uses, called by the real SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ADDRESS = "http://base-rl.test/v1"
RUN_KEY = "rl-run-test"

Message = dict[str, Any]
Script = Callable[[list[Message]], Message]
"""Function from the messages of a request to the assistant's next message."""


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(arguments: str, name: str = "calculator") -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


class ScriptedServer:
    """Answers with `script` and records every request. The first `failing_requests` of the agent get a 503.

    `named` has sessions that are opened by a call, under a name in a header: the key of each by its name.
    """

    def __init__(
        self,
        script: Script,
        *,
        failing_requests: int = 0,
        refuse_sessions: int | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self.rewards: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}
        self.keys_seen: set[str] = set()
        self.callers: list[tuple[str, str | None]] = []
        """Key and session's name of each request."""
        self.at_work = 0
        self.most_at_work = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._failing = failing_requests
        self._refuse_sessions = refuse_sessions
        self._keys: dict[str, str] = dict(named or {})

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/sessions", self._open, methods=["POST"]),
            Route("/v1/sessions/{id}/end", self._end, methods=["POST"]),
            Route("/v1/feedback", self._reward, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def client(self) -> AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.app())
        return AsyncOpenAI(
            base_url=ADDRESS, api_key=RUN_KEY, max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
        )

    async def _complete(self, request: Request) -> Response:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await self.hold.wait()
            await asyncio.sleep(0)
            self.callers.append((_key(request), request.headers.get("x-base-rl-session")))
            return self._answer(await request.json(), _key(request))
        finally:
            self.at_work -= 1

    def _answer(self, body: dict[str, Any], key: str) -> Response:
        self.requests.append(body)
        self.keys_seen.add(key)
        if self._failing:
            self._failing -= 1
            return _error(503)
        message = self.script(body["messages"])
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}
        return JSONResponse(
            {"id": "turn_1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    async def _open(self, request: Request) -> Response:
        if self._refuse_sessions is not None:
            return _error(self._refuse_sessions)
        assert _key(request) == RUN_KEY
        body = await request.json()
        self.groups.append(body)
        made = [self._new_session() for _ in range(body["n"])]
        return JSONResponse(made[0] if body["n"] == 1 else {"sessions": made}, status_code=201)

    def _new_session(self) -> dict[str, str]:
        session_id = f"ses_{len(self._keys)}"
        self._keys[session_id] = f"rl-session-{session_id}"
        return {"id": session_id, "api_key": self._keys[session_id], "base_url": ADDRESS}

    async def _end(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        assert _key(request) == self._keys[session_id]
        self.outcomes[session_id] = (await request.json())["outcome"]
        return JSONResponse({})

    async def _reward(self, request: Request) -> Response:
        body = json.loads(await request.body())
        assert _key(request) == self._keys[body["session_id"]]
        assert body["session_id"] not in self.rewards
        self.rewards[body["session_id"]] = body["reward"]
        return JSONResponse({"effect": "recorded"}, status_code=201)


def _key(request: Request) -> str:
    return request.headers["authorization"].removeprefix("Bearer ")


def _error(status: int) -> Response:
    detail = {"message": "not now", "type": "scripted", "param": None, "code": None}
    return JSONResponse({"error": detail}, status_code=status)
