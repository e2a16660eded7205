"""The adapter of every engine: SGLang's native HTTP API, which the embedded engine speaks too."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, TypeVar

import httpx
import msgspec

from proxy.contract.turn import ConstraintKind, SamplingParameters
from proxy.engines.connections import Connections
from proxy.engines.interface import (
    EngineChunk,
    EngineInfo,
    GenerateRequest,
    PauseMode,
)
from proxy.engines.replies import ReplyParser, failure_of, message_of, refusal_of
from proxy.errors import (
    BaseRlError,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
)
from proxy.settings import EngineSettings

CONTROL_CALLS = 16
ABORT_SECONDS = 5.0
CONTROL_SECONDS = 120.0
"""Longest wait for a weight update or a pause."""
HEALTH_SECONDS = 25.0
"""SGLang's own health check answers after one second at best and gives up after twenty."""
JSON = {"content-type": "application/json"}
Info = TypeVar("Info")
DATA = "data: "
DONE = "[DONE]"


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str


class _ServerInfo(msgspec.Struct, frozen=True):
    grammar_backend: str | None = None


GRAMMAR = {
    "llguidance": frozenset(ConstraintKind),
    "xgrammar": frozenset(ConstraintKind),
    "outlines": frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX}),
}
"""What each of SGLang's grammar back ends enforces."""


class SglangEngine:
    """An engine at `url`, with up to `settings.max_concurrency` generations at once; further ones wait.

    SGLang's prefix cache outlives a weight update that lets requests go on. So every request carries a key, which is
    the label of the weights, or one of its own time while they change: SGLang shares prefixes only between requests
    of one key, and none is reused under weights that did not compute it.
    """

    def __init__(self, url: str, settings: EngineSettings) -> None:
        timeout = httpx.Timeout(settings.read_timeout_seconds, connect=settings.connect_timeout_seconds)
        address = url.rstrip("/")
        self._calls = Connections(address, limit=settings.max_concurrency, timeout=timeout)
        # Of its own, so that a weight update never waits for generations to end.
        self._control_calls = Connections(address, limit=CONTROL_CALLS, timeout=timeout)
        self._label: str | None = None
        self._interim_key: str | None = None
        self._pause_mode: PauseMode | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[EngineChunk]:
        """Streams chunks; closing the iterator early aborts the generation in the engine.

        Raises InvalidRequest for what the engine refuses, EngineUnavailable when it is down or dies meanwhile,
        EngineTimeout after a silence of the read timeout, EngineFailed for everything else.
        """
        parser = ReplyParser()
        replies = self._streamed(request, parser) if request.stream else self._whole(request, parser)
        over = False
        try:
            async with contextlib.aclosing(replies):
                async for chunk in replies:
                    # Before the yield: a reader that stops at the last chunk leaves nothing to abort.
                    over = parser.finished
                    yield chunk
            if not parser.finished:
                raise EngineUnavailable("the engine closed the stream before the answer was whole")
        except (EngineUnavailable, InvalidRequest):
            over = True
            raise
        finally:
            if not over:
                self._abort_in_background(request.request_id)

    async def _whole(self, request: GenerateRequest, parser: ReplyParser) -> AsyncGenerator[EngineChunk]:
        with _failures():
            async with self._calls.client() as client:
                response = await client.post("/generate", content=self._body(request), headers=JSON)
        if response.status_code != httpx.codes.OK:
            raise refusal_of(response.status_code, message_of(response.content))
        yield parser.parse(response.content)

    async def _streamed(self, request: GenerateRequest, parser: ReplyParser) -> AsyncGenerator[EngineChunk]:
        with _failures():
            async with (
                self._calls.client() as client,
                client.stream("POST", "/generate", content=self._body(request), headers=JSON) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    raise refusal_of(response.status_code, message_of(await response.aread()))
                async for line in response.aiter_lines():
                    if not line.startswith(DATA):
                        continue
                    data = line[len(DATA) :]
                    if data == DONE:
                        return
                    chunk = parser.parse(data)
                    if chunk.output_ids or chunk.finish is not None:
                        yield chunk

    def _body(self, request: GenerateRequest) -> bytes:
        body: dict[str, Any] = {
            "rid": _engine_id(request.request_id),
            "input_ids": request.input_ids,
            "sampling_params": sampling_body(request.sampling),
            "return_logprob": True,
            "stream": request.stream,
        }
        if request.top_logprobs:
            body["top_logprobs_num"] = request.top_logprobs
        if prefix_key := self._interim_key or self._label:
            body["extra_key"] = prefix_key
        return msgspec.json.encode(body)

    def _abort_in_background(self, request_id: str) -> None:
        """In a task of its own: whoever closes the iterator may be in the middle of being cancelled."""
        task = asyncio.create_task(self._abort_quietly(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(BaseRlError):
            await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        await self._control("/abort_request", {"rid": _engine_id(request_id)}, seconds=ABORT_SECONDS)

    async def pause(self, mode: PauseMode) -> None:
        # What arrives from now on may run under other weights than those that are loaded.
        self._interim_key, self._pause_mode = uuid.uuid4().hex, mode
        await self._control("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        self._interim_key = self._pause_mode = None
        await self._control("/continue_generation", {})

    async def flush_cache(self) -> None:
        await self._control("/flush_cache", {})

    async def load_weights(self, path: str, label: str) -> None:
        """Loads a directory and verifies that `label` is served. Raises EngineFailed when it is not."""
        before, self._interim_key = self._interim_key, uuid.uuid4().hex
        # Requests that were retracted would find what the old weights computed of them in the cache. Those that are
        # frozen need it as it is.
        flush = self._pause_mode is not PauseMode.IN_PLACE
        body = {"model_path": path, "weight_version": label, "flush_cache": flush}
        refusal: EngineFailed | None = None
        try:
            await self._control("/update_weights_from_disk", body)
        except EngineFailed as error:
            # SGLang also answers 400 when it has updated and could only not flush its cache: the label decides.
            refusal = error
        finally:
            self._interim_key = before
        served = (await self._model_info()).weight_version
        if served != label:
            reason = refusal.message if refusal is not None else f"it serves {served!r} afterwards"
            raise EngineFailed(f"the engine did not take the weights in {path}: {reason}") from refusal

    async def label_weights(self, label: str) -> None:
        """Names the loaded weights; requests in flight go on."""
        await self._control("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def info(self) -> EngineInfo:
        model = await self._model_info()
        server = await self._look("/server_info", _ServerInfo)
        return EngineInfo(
            model_path=model.model_path,
            weight_label=model.weight_version,
            grammar=GRAMMAR.get(server.grammar_backend or "", frozenset()),
        )

    async def _model_info(self) -> _ModelInfo:
        model = await self._look("/model_info", _ModelInfo)
        self._label = model.weight_version
        return model

    async def _look(self, path: str, kind: type[Info]) -> Info:
        with _failures():
            async with self._control_calls.client() as client:
                response = await client.get(path, timeout=CONTROL_SECONDS)
        if response.status_code != httpx.codes.OK:
            raise failure_of(response.status_code, message_of(response.content))
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"the engine's {path} cannot be read: {error}") from error

    async def healthy(self) -> bool:
        try:
            async with self._control_calls.client() as client:
                response = await client.get("/health_generate", timeout=HEALTH_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
        return response.status_code == httpx.codes.OK

    async def aclose(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_SECONDS)
        await self._calls.aclose()
        await self._control_calls.aclose()

    async def _control(self, path: str, body: dict[str, Any], seconds: float = CONTROL_SECONDS) -> None:
        content = msgspec.json.encode(body)
        with _failures():
            async with self._control_calls.client() as client:
                response = await client.post(path, content=content, headers=JSON, timeout=seconds)
        if response.status_code != httpx.codes.OK:
            raise failure_of(response.status_code, message_of(response.content))


def _engine_id(request_id: str) -> str:
    """SGLang aborts every request whose id begins with the given one; with an end mark none begins with another."""
    return f"{request_id}/"


def sampling_body(sampling: SamplingParameters) -> dict[str, Any]:
    """SGLang's `sampling_params`. The text options make its text say what the ids say, special tokens and all."""
    body: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    optional: dict[str, tuple[Any, Any]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
        "min_p": (sampling.min_p, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "sampling_seed": (sampling.seed, None),
        "stop": (sampling.stop, ()),
        "stop_token_ids": (sampling.stop_token_ids, ()),
        "logit_bias": (sampling.logit_bias, None),
    }
    body |= {name: value for name, (value, default) in optional.items() if value != default}
    if sampling.constraint is not None:
        body[sampling.constraint.kind.value] = sampling.constraint.text
    return body


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """httpx's errors as ours: not reached or lost is unavailable, silent is a timeout."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise EngineUnavailable(f"the engine cannot be reached: {_words(error)}") from error
    except httpx.TimeoutException as error:
        raise EngineTimeout(f"the engine did not answer in time: {_words(error)}") from error
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise EngineUnavailable(f"the connection to the engine was lost: {_words(error)}") from error
    except httpx.HTTPError as error:
        raise EngineFailed(f"the call to the engine failed: {_words(error)}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
