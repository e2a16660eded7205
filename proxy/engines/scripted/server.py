"""The HTTP front: SGLang's native endpoints over a script."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.engines.compiled_grammars import GrammarRefused
from proxy.engines.scripted.answers import AnswerWriter
from proxy.engines.scripted.constraints import ConstraintCheck
from proxy.engines.scripted.generation import Clockwork, Generation, Plan, cut
from proxy.engines.scripted.matching import NoRule, PromptReader, Rules
from proxy.engines.scripted.script import Script
from proxy.engines.scripted.wire import (
    Abort,
    BodyReader,
    DiskUpdate,
    GenerateBody,
    Pause,
    RequestRefused,
    VersionUpdate,
)
from proxy.tokens.template import ChatTemplate

log = logging.getLogger("base_rl.scripted")

LOGPROB = -1.0
"""Of every token: a stand-in, as there is no distribution. Not 0, which elsewhere stands for what is missing. With
`top_logprobs_num` the said token comes first and others follow with -2, -3, and so on."""

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ScriptedEngine:
    """The application. `/generate` is bare ASGI, as it has to be cheap; the rest is Starlette's.

    Raises ConfigurationError for a template that the script's answers cannot be written in.
    """

    def __init__(self, template: ChatTemplate, script: Script, *, model: str, weight_label: str) -> None:
        self._model = model
        self._clockwork = Clockwork(weight_label)
        self._rules = Rules(script, PromptReader(template))
        self._writer = AnswerWriter(template)
        for number, rule in enumerate(script.rule, 1):
            self._writer.check(number, rule)
        self._constraints = _constraint_check(template)
        self._defaults = script.defaults
        self._bodies = BodyReader(vocabulary=template.vocabulary_size, context=template.context_length)
        self._vocabulary = template.vocabulary_size
        self._context = template.context_length
        self._stop_ids = frozenset(template.stop_ids)
        self._decode = template.tokenizer.decode
        self._controls = Starlette(routes=self._routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(receive, send)
        else:
            await self._controls(scope, receive, send)

    async def _generate(self, receive: Receive, send: Send) -> None:
        message = await receive()
        content: bytes = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            content += message.get("body", b"")
        try:
            body, generation = await self._begin(content)
        except (RequestRefused, GrammarRefused, NoRule) as error:
            await _send_json(send, 400, {"error": {"message": str(error)}})
            return
        # Whoever asked may go while the answer waits; an answer that is there at once is sent before one could know.
        gone = asyncio.create_task(_gone(receive, generation)) if body.stream or generation.waits else None
        self._clockwork.live.add(generation)
        try:
            if body.stream:
                await self._stream(body, generation, send)
            else:
                await self._answer(body, generation, send)
        finally:
            self._clockwork.live.discard(generation)
            if gone is not None:
                gone.cancel()

    async def _begin(self, content: bytes) -> tuple[GenerateBody, Generation]:
        body, sampling, limit = self._bodies.read(content)
        chosen = self._rules.choose(body.input_ids)
        rule = chosen.rule
        ids, finish = cut(
            self._writer.ids(chosen),
            sampling,
            limit=limit,
            stop_ids=self._stop_ids,
            repeated=rule.finish == "length",
            decode=self._decoded,
        )
        for constraint in sampling.constraints:
            if self._constraints is None:
                raise RequestRefused("constraints need a tokenizer that llguidance can read, and the model has none.")
            whole = finish["type"] == "stop" and finish["matched"] in self._stop_ids
            said = ids[:-1] if whole else ids
            await self._constraints.check(constraint, said, number=chosen.number, whole=whole)
        if rule.error is not None:
            ids = ids[: rule.error.after_tokens]
        delay = self._defaults.delay_ms if rule.delay_ms is None else rule.delay_ms
        interval = self._defaults.ms_per_token if rule.ms_per_token is None else rule.ms_per_token
        plan = Plan(ids=ids, finish=finish, delay=delay / 1000, interval=interval / 1000, failure=rule.error)
        return body, Generation(body.rid or uuid.uuid4().hex, plan, self._clockwork)

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text: str = self._decode(ids, skip_special_tokens=False)
        return text

    async def _answer(self, body: GenerateBody, generation: Generation, send: Send) -> None:
        async for _ in generation.steps(whole=True):
            pass
        failure = generation.plan.failure
        if failure is not None and generation.aborted is None:
            await _send_json(send, failure.status, {"error": {"message": failure.message}})
        else:
            await _send_json(send, 200, self._chunk(body, generation, 0, last=True))

    async def _stream(self, body: GenerateBody, generation: Generation, send: Send) -> None:
        """Every chunk has what is new; the last one comes with the end, once it is known."""
        failure = generation.plan.failure
        if failure is not None and failure.after_tokens == 0:
            await self._answer(body, generation, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        total, sent = len(generation.plan.ids), 0
        async for _ in generation.steps(whole=False):
            if generation.said < total or failure is not None:
                await _send_event(send, self._chunk(body, generation, sent, last=False))
                sent = generation.said
        last: dict[str, Any] = self._chunk(body, generation, sent, last=True)
        if failure is not None and generation.aborted is None:
            last = {"error": {"message": failure.message, "code": failure.status}}
        await _send_event(send, last, end=True)

    def _chunk(self, body: GenerateBody, generation: Generation, start: int, *, last: bool) -> dict[str, Any]:
        said = generation.said
        ids = generation.plan.ids[start:said]
        meta: dict[str, Any] = {
            "id": generation.rid,
            "finish_reason": generation.finish if last else None,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": said,
            "weight_version": self._clockwork.label,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = [(LOGPROB, token, None) for token in ids]
            if body.top_logprobs_num:
                meta["output_top_logprobs"] = [self._ranked(token, body.top_logprobs_num) for token in ids]
        if last:
            meta["weight_versions"] = [
                {"version": label, "start": first, "end": end} for label, first, end in generation.spans
            ]
            meta["num_retractions"] = generation.retractions
        return {"output_ids": ids, "meta_info": meta}

    def _ranked(self, token: int, count: int) -> list[tuple[float, int, None]]:
        others = ((token + rank) % self._vocabulary for rank in range(min(count, self._vocabulary)))
        return [(LOGPROB - rank, other, None) for rank, other in enumerate(others)]

    def _routes(self) -> list[Route]:
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._update_version,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/abort_request": self._abort,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/health": self._health,
            "/health_generate": self._health,
        }
        return [
            Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]

    async def _update_from_disk(self, request: Request) -> Response:
        """Takes the label; there is nothing to load, but the directory must be there."""
        try:
            body = msgspec.json.decode(await request.body(), type=DiskUpdate)
        except msgspec.DecodeError as error:
            return _outcome(success=False, message=str(error), num_paused_requests=0)
        if not any((Path(body.model_path) / name).is_file() for name in ("config.json", "adapter_config.json")):
            message = f"{body.model_path} is no model and no adapter: there is no config.json"
            return _outcome(success=False, message=message, num_paused_requests=0)
        self._model = body.model_path
        if body.weight_version is not None:
            self._clockwork.label = body.weight_version
        return _outcome(success=True, message="Succeeded to update model weights.", num_paused_requests=0)

    async def _update_version(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=VersionUpdate)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        if body.abort_all_requests:
            self._clockwork.abort(None)
        self._clockwork.label = body.new_version
        message = f"Weight version updated to {body.new_version}"
        return _outcome(success=True, message=message, new_version=body.new_version)

    async def _pause(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body() or b"{}", type=Pause)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        self._clockwork.pause(body.mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, _: Request) -> Response:
        self._clockwork.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=Abort)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        self._clockwork.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)

    async def _flush_cache(self, _: Request) -> Response:
        if self._clockwork.live:
            return Response("Flush cache failed: requests are running or waiting.\n", status_code=400)
        return Response("Cache flushed.\n")

    async def _model_info(self, _: Request) -> Response:
        return _json(
            {
                "model_path": self._model,
                "is_generation": True,
                "weight_version": self._clockwork.label,
                "model_type": "scripted",
                "architectures": [],
            }
        )

    async def _server_info(self, _: Request) -> Response:
        return _json(
            {
                "model_path": self._model,
                "weight_version": self._clockwork.label,
                "context_length": self._context,
                "grammar_backend": "none" if self._constraints is None else "llguidance",
                "enable_deterministic_inference": True,
                "adapters_from_disk": True,
                "running": len(self._clockwork.live),
                "answers_by_rule": self._rules.used,
            }
        )

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200)


def _constraint_check(template: ChatTemplate) -> ConstraintCheck | None:
    try:
        return ConstraintCheck(template)
    except ValueError as error:
        log.warning("constraints are refused: llguidance cannot read the tokenizer: %s", error)
        return None


async def _gone(receive: Receive, generation: Generation) -> None:
    """Ends the generation when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.abort("The client has gone")


async def _send_json(send: Send, status: int, content: object) -> None:
    await send({"type": "http.response.start", "status": status, "headers": JSON_HEADERS})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


async def _send_event(send: Send, content: object, *, end: bool = False) -> None:
    tail = b"\n\ndata: [DONE]\n\n" if end else b"\n\n"
    data = b"data: " + msgspec.json.encode(content) + tail
    await send({"type": "http.response.body", "body": data, "more_body": not end})


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _refused(message: str) -> Response:
    return _json({"error": {"message": message}}, 400)


def _outcome(*, success: bool, message: str, **more: object) -> Response:
    return _json({"success": success, "message": message, **more}, 200 if success else 400)
