"""The HTTP front: SGLang's native endpoints over the scheduler."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.engines.compiled_grammars import GrammarRefused
from proxy.engines.embedded.adapters import holds_adapter, read_adapted
from proxy.engines.embedded.generation import Generation
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.scheduler import Scheduler, figures
from proxy.engines.embedded.stopping import StopStrings
from proxy.engines.embedded.weights import WeightsRefused, read_directory, read_serialized
from proxy.engines.embedded.wire import GenerateBody, RequestRefused, rules_of

HEALTH_SECONDS = 20.0
"""A model thread that ends no step for this long is not healthy."""

InputLogprob = tuple[float | None, int, None]
"""Log-probability, token, and SGLang's place for its text."""
Result = TypeVar("Result")
JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class DiskUpdate(msgspec.Struct, frozen=True):
    """`flush_cache` needs nothing here: no cache outlives its request."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class TensorUpdate(msgspec.Struct, frozen=True):
    serialized_named_tensors: list[str]
    weight_version: str | None = None
    flush_cache: bool = True


class VersionUpdate(msgspec.Struct, frozen=True):
    new_version: str
    abort_all_requests: bool = True


class Pause(msgspec.Struct, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(msgspec.Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


def create_app(model: ServedModel, *, weight_label: str, max_running: int, max_total_tokens: int) -> Starlette:
    """The application; its lifespan runs the model thread."""
    engine = EmbeddedEngine(model)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.scheduler = Scheduler(
            model,
            weight_label=weight_label,
            max_running=max_running,
            max_total_tokens=max_total_tokens,
            loop=asyncio.get_running_loop(),
        )
        engine.scheduler.start()
        yield
        await asyncio.to_thread(engine.scheduler.close)

    return Starlette(routes=engine.routes(), lifespan=lifespan)


class EmbeddedEngine:
    """The endpoints. What they change, they change in the model thread, between two steps."""

    scheduler: Scheduler

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    def routes(self) -> list[Route]:
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/update_weights_from_disk": self.update_from_disk,
            "/begin_weight_update": self.begin_update,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/end_weight_update": self.end_update,
            "/update_weight_version": self.update_version,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
        }
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/health": self.health,
            "/health_generate": self.health,
        }
        return [
            Route("/generate", GenerateEndpoint(self), methods=["POST"]),
            Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]

    async def between_steps(self, command: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.scheduler.submit(command))

    async def update_from_disk(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=DiskUpdate)
            # The files are read while requests go on; only the copy stops them.
            read = read_adapted if holds_adapter(body.model_path) else read_directory
            tensors = await asyncio.to_thread(read, body.model_path)
            await self.between_steps(partial(self.scheduler.load, tensors, label=body.weight_version, complete=True))
        except (WeightsRefused, msgspec.DecodeError) as error:
            return _outcome(success=False, message=str(error), num_paused_requests=0)
        self.model.path = body.model_path
        return _outcome(success=True, message="Succeeded to update model weights.", num_paused_requests=0)

    async def begin_update(self, request: Request) -> Response:
        if self.scheduler.updating:
            return _outcome(success=False, message="A weight update has begun already.")
        self.scheduler.updating = True
        return _outcome(success=True, message="Success")

    async def update_from_tensor(self, request: Request) -> Response:
        if not self.scheduler.updating:
            return _outcome(success=False, message="Call /begin_weight_update first.")
        try:
            body = msgspec.json.decode(await request.body(), type=TensorUpdate)
            tensors = await asyncio.to_thread(read_serialized, body.serialized_named_tensors)
            await self.between_steps(partial(self.scheduler.load, tensors, label=body.weight_version, complete=False))
        except (WeightsRefused, msgspec.DecodeError) as error:
            return _outcome(success=False, message=str(error))
        return _outcome(success=True, message="Success")

    async def end_update(self, request: Request) -> Response:
        if not self.scheduler.updating:
            return _outcome(success=False, message="No weight update has begun.")
        self.scheduler.updating = False
        return _outcome(success=True, message="Success")

    async def update_version(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=VersionUpdate)
        except msgspec.DecodeError as error:
            return _refused(str(error))

        def rename() -> None:
            if body.abort_all_requests:
                self.scheduler.abort(None)
            self.scheduler.weight_label = body.new_version

        await self.between_steps(rename)
        message = f"Weight version updated to {body.new_version}"
        return _outcome(success=True, message=message, new_version=body.new_version)

    async def pause(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body() or b"{}", type=Pause)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        await self.between_steps(partial(self.scheduler.pause, body.mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self.between_steps(self.scheduler.resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=Abort)
        except msgspec.DecodeError as error:
            return _refused(str(error))
        await self.between_steps(partial(self.scheduler.abort, None if body.abort_all else body.rid))
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        if not await self.between_steps(self.scheduler.flush):
            return Response("Flush cache failed: requests are running or waiting.\n", status_code=400)
        return Response("Cache flushed.\n")

    async def model_info(self, request: Request) -> Response:
        config = self.model.network.config
        return _json(
            {
                "model_path": self.model.path,
                "is_generation": True,
                "weight_version": self.scheduler.weight_label,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, request: Request) -> Response:
        return _json(await self.between_steps(partial(figures, self.scheduler)))

    async def health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self.between_steps(self.scheduler.load_counts)
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=200)


class GenerateEndpoint:
    """`/generate`, as bare ASGI: it has to hear that the client has gone while it waits for tokens."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._decoder = msgspec.json.Decoder(GenerateBody)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await Request(scope, receive).body()
        ready = asyncio.Event()
        try:
            body = self._decoder.decode(raw)
            generation = await self._generation(body, ready.set)
        except (RequestRefused, GrammarRefused, msgspec.DecodeError) as error:
            await _refused(str(error))(scope, receive, send)
            return
        scheduler = self._engine.scheduler
        scored = await self._scored(body)
        scheduler.add(generation)
        gone = asyncio.create_task(_disconnected(receive, ready))
        try:
            if body.stream:
                await self._stream(body, generation, scored, ready, gone, send)
            else:
                await self._answer(body, generation, scored, ready, gone, send)
        finally:
            gone.cancel()
            if generation.finish is None:
                scheduler.submit(partial(scheduler.drop, generation))

    async def _generation(self, body: GenerateBody, notify: Callable[[], None]) -> Generation:
        model = self._engine.model
        rules = rules_of(body, vocabulary=model.vocabulary, context=model.context)
        grammar = None
        if rules.constraint is not None:
            if model.grammars is None:
                raise RequestRefused("constraints need a fast tokenizer and an end token, and the model lacks one.")
            grammar = await model.grammars.compile(rules.constraint, rules.stop_token_ids)
        stop_strings = None
        if rules.stop:
            if model.decode is None:
                raise RequestRefused("stop strings need a tokenizer, and the model's directory has none.")
            stop_strings = StopStrings(rules.stop, model.decode)
        return Generation(
            rid=body.rid or uuid.uuid4().hex,
            prompt=body.input_ids,
            rules=rules,
            # An answer that its grammar ends can only end, also where the end was to be ignored.
            stop_ids=frozenset() if rules.ignore_eos and grammar is None else model.eos_ids | rules.stop_token_ids,
            stop_strings=stop_strings,
            grammar=grammar,
            stream=body.stream,
            notify=notify,
        )

    async def _scored(self, body: GenerateBody) -> list[InputLogprob] | None:
        """None where they are not asked for. The first token has no log-probability, as in SGLang."""
        start = body.logprob_start_len
        if not body.return_logprob or start < 0:
            return None
        score = partial(self._engine.model.score, body.input_ids, start + 1)
        found = await self._engine.between_steps(score) if start + 1 < len(body.input_ids) else []
        return [(each, token, None) for each, token in zip([None, *found], body.input_ids[start:], strict=True)]

    async def _answer(
        self,
        body: GenerateBody,
        generation: Generation,
        scored: list[InputLogprob] | None,
        ready: asyncio.Event,
        gone: asyncio.Task[None],
        send: Send,
    ) -> None:
        while generation.finish is None:
            await ready.wait()
            ready.clear()
            if gone.done():
                return
        status, content = 200, self._chunk(body, generation, scored, 0, len(generation.logprobs), last=True)
        if generation.failure is not None:
            status, content = 500, {"error": {"message": generation.failure}}
        await send({"type": "http.response.start", "status": status, "headers": JSON_HEADERS})
        await send({"type": "http.response.body", "body": msgspec.json.encode(content)})

    async def _stream(
        self,
        body: GenerateBody,
        generation: Generation,
        scored: list[InputLogprob] | None,
        ready: asyncio.Event,
        gone: asyncio.Task[None],
        send: Send,
    ) -> None:
        """Sends what is new at every wake-up: each chunk holds only the tokens since the one before."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        sent, last = 0, False
        while not last:
            await ready.wait()
            ready.clear()
            if gone.done():
                return
            last = generation.finish is not None
            have = len(generation.logprobs)
            if have == sent and not last:
                continue
            content = self._chunk(body, generation, scored if sent == 0 else None, sent, have, last=last)
            if generation.failure is not None:
                content = {"error": {"message": generation.failure, "code": 500}}
            sent = have
            tail = b"\n\ndata: [DONE]\n\n" if last else b"\n\n"
            data = b"data: " + msgspec.json.encode(content) + tail
            await send({"type": "http.response.body", "body": data, "more_body": not last})

    def _chunk(
        self,
        body: GenerateBody,
        generation: Generation,
        scored: list[InputLogprob] | None,
        start: int,
        end: int,
        *,
        last: bool,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": generation.rid,
            "finish_reason": generation.finish if last else None,
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": end,
            "weight_version": self._engine.scheduler.weight_label,
        }
        ids = generation.output[start:end]
        if scored is not None:
            meta["input_token_logprobs"] = scored
        if body.return_logprob:
            logprobs = generation.logprobs[start:end]
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs, ids, strict=True)
            ]
            if generation.rules.top_logprobs:
                meta["output_top_logprobs"] = [
                    [(logprob, token, None) for logprob, token in top] for top in generation.tops[start:end]
                ]
        if last:
            meta["weight_version"] = generation.final_label
            meta["weight_versions"] = generation.spans()
            meta["num_retractions"] = generation.retractions
        return {"output_ids": ids, "meta_info": meta}


async def _disconnected(receive: Receive, ready: asyncio.Event) -> None:
    """Returns when the client has gone, and wakes whoever waits for tokens."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ready.set()


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _refused(message: str) -> Response:
    return _json({"error": {"message": message}}, 400)


def _outcome(*, success: bool, message: str, **more: object) -> Response:
    return _json({"success": success, "message": message, **more}, 200 if success else 400)
