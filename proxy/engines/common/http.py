"""The HTTP front that base-rl's own engines share: SGLang's control endpoints, and the pieces of `/generate`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send

from proxy.engines.common.wire import (
    Abort,
    AdapterLoad,
    AdapterUnload,
    DiskUpdate,
    Pause,
    RequestRefused,
    VersionUpdate,
)

_JSON_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_Message = TypeVar("_Message")
_Handler = Callable[[Request], Awaitable[Response]]


class ControlledEngine(Protocol):
    """An engine as its control endpoints call it."""

    async def load_directory(self, path: str, label: str | None) -> None:
        """Replace the weights, and their label unless it is None. Raises RequestRefused with nothing changed."""
        ...

    async def rename_weights(self, label: str, *, abort_all: bool) -> None:
        """Give the loaded weights another label."""
        ...

    async def load_adapter(self, body: AdapterLoad) -> None:
        """Load a LoRA adapter beside the others. Raises RequestRefused with nothing changed."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter once its running requests have ended. Raises RequestRefused for an unknown name."""
        ...

    def adapters(self) -> Mapping[str, str]:
        """Return the adapters in memory: their paths by name."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop generating; `mode` is one of `Pause`."""
        ...

    async def resume(self) -> None:
        """Continue generating."""
        ...

    async def abort(self, rid: str | None) -> None:
        """End the requests of this id, or all requests for None."""
        ...

    async def flush_cache(self) -> bool:
        """Release the cache's memory; return False, with nothing done, while requests run or wait."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """Return the answer of `/model_info`. Never wait for the model: the proxy's pings ask for it."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Return the answer of `/server_info`."""
        ...

    async def is_healthy(self) -> bool:
        """Return whether the engine would generate now."""
        ...


class ControlEndpoints:
    """SGLang's control endpoints over one engine."""

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        """Return all endpoints but `/generate`; two of them have a former name of SGLang's too."""
        posts: dict[str, _Handler] = {
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._update_version,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/abort_request": self._abort,
        }
        gets: dict[str, _Handler] = {
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/v1/models": self._models,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/health": self._health,
            "/health_generate": self._health,
        }
        return [
            Route("/flush_cache", self._flush_cache, methods=["GET", "POST"]),  # as in SGLang
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]

    async def _update_from_disk(self, request: Request) -> Response:
        try:
            body = decode(await request.body(), DiskUpdate)
            await self._engine.load_directory(body.model_path, body.weight_version)
        except RequestRefused as error:
            return outcome(success=False, message=str(error), num_paused_requests=0)
        return outcome(success=True, message="Succeeded to update model weights.", num_paused_requests=0)

    async def _update_version(self, request: Request) -> Response:
        try:
            body = decode(await request.body(), VersionUpdate)
        except RequestRefused as error:
            return refusal(str(error))
        await self._engine.rename_weights(body.new_version, abort_all=body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return outcome(success=True, message=message, new_version=body.new_version)

    async def _load_adapter(self, request: Request) -> Response:
        try:
            await self._engine.load_adapter(decode(await request.body(), AdapterLoad))
        except RequestRefused as error:
            return self._adapter_outcome(str(error))
        return self._adapter_outcome(None)

    async def _unload_adapter(self, request: Request) -> Response:
        try:
            await self._engine.unload_adapter(decode(await request.body(), AdapterUnload).lora_name)
        except RequestRefused as error:
            return self._adapter_outcome(str(error))
        return self._adapter_outcome(None)

    def _adapter_outcome(self, refused: str | None) -> Response:
        content = {
            "success": refused is None,
            "error_message": refused,
            "loaded_adapters": dict(self._engine.adapters()),
        }
        return _json(content, 200 if refused is None else 400)

    async def _models(self, _: Request) -> Response:
        base = (await self._engine.model_info())["model_path"]
        adapters = [
            {"id": name, "object": "model", "owned_by": "sglang", "root": path, "parent": base}
            for name, path in self._engine.adapters().items()
        ]
        own = {"id": base, "object": "model", "owned_by": "sglang", "root": base, "parent": None}
        return _json({"object": "list", "data": [own, *adapters]})

    async def _pause(self, request: Request) -> Response:
        try:
            body = decode(await request.body() or b"{}", Pause)
        except RequestRefused as error:
            return refusal(str(error))
        await self._engine.pause(body.mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, _: Request) -> Response:
        await self._engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: Request) -> Response:
        try:
            body = decode(await request.body(), Abort)
        except RequestRefused as error:
            return refusal(str(error))
        await self._engine.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)

    async def _flush_cache(self, _: Request) -> Response:
        if not await self._engine.flush_cache():
            return Response("Flush cache failed: requests are running or waiting.\n", status_code=400)
        return Response("Cache flushed.\n")

    async def _model_info(self, _: Request) -> Response:
        return _json(await self._engine.model_info())

    async def _server_info(self, _: Request) -> Response:
        return _json(await self._engine.server_info())

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if await self._engine.is_healthy() else 503)


def decode(content: bytes, kind: type[_Message]) -> _Message:
    """Return the body of a request. Raises RequestRefused."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise RequestRefused(str(error)) from error


def refusal(message: str) -> Response:
    """Return SGLang's answer to a wrong request."""
    return _json({"error": {"message": message}}, 400)


def outcome(*, success: bool, message: str, **more: object) -> Response:
    """Return SGLang's answer to a weight update."""
    return _json({"success": success, "message": message, **more}, 200 if success else 400)


async def send_json(send: Send, status: int, content: object) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": _JSON_HEADERS})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


async def start_stream(send: Send) -> None:
    """Send the head of a stream of server-sent events."""
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})


async def send_event(send: Send, content: object, *, last: bool = False) -> None:
    """Send one event; behind the last one, SGLang's end mark."""
    end = b"\n\ndata: [DONE]\n\n" if last else b"\n\n"
    data = b"data: " + msgspec.json.encode(content) + end
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
