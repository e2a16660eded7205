"""The adapter of every engine: SGLang's native HTTP API, which the embedded engine speaks too."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from proxy.contract.turn import SamplingParameters
from proxy.engines.bounds import ReplyBounds
from proxy.engines.connections import LARGEST_BODY, Connections, Reply
from proxy.engines.grammars import ENFORCED, constraint_for
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
    InvalidEngineReply,
    InvalidRequest,
)
from proxy.settings import ConfigurationError, EngineSettings

CONTROL_CALLS = 16
ABORT_SECONDS = 5.0
CONTROL_SECONDS = 120.0
"""Longest wait for a weight update or a pause."""
HEALTH_SECONDS = 25.0
"""SGLang's own health check answers after one second at best and gives up after twenty."""
LARGE_IDS = 1 << 14
"""Token ids that were not written as text before: writing so many takes two milliseconds."""
LARGE_BIASES = 1 << 10
LARGE_CONSTRAINT = 1 << 14
"""Characters of a grammar, which is decoded, rewritten and encoded."""
Info = TypeVar("Info")
DATA = b"data: "
DONE = b"[DONE]"


class _ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str


class _ServerInfo(msgspec.Struct, frozen=True):
    grammar_backend: str | None = None
    enable_deterministic_inference: bool = False
    adapters_from_disk: bool = False


class SglangEngine:
    """An engine at `url`, with up to `settings.max_concurrency` generations at once; further ones wait.

    SGLang's prefix cache outlives a weight update that lets requests go on. So every request carries a key, which is
    the label of the weights, or one of its own time while they change: SGLang shares prefixes only between requests
    of one key, and none is reused under weights that did not compute it.
    """

    def __init__(self, url: str, settings: EngineSettings) -> None:
        address = url.rstrip("/")
        connect, silence = settings.connect_timeout_seconds, settings.read_timeout_seconds
        try:
            self._calls = Connections(
                address,
                limit=settings.max_concurrency,
                connect_seconds=connect,
                silence_seconds=silence,
                is_excused=lambda: self._pause_mode is not None,
            )
        except ValueError as error:
            raise ConfigurationError(f"engine.url: {error}") from error
        self._name = _public_address(address)
        # Of its own, so that a weight update never waits for generations to end.
        self._control_calls = Connections(
            address, limit=CONTROL_CALLS, connect_seconds=connect, silence_seconds=CONTROL_SECONDS
        )
        self._pings = Connections(address, limit=1, connect_seconds=connect, silence_seconds=connect)
        self._stall_seconds = min(settings.stall_timeout_seconds, settings.read_timeout_seconds)
        self._label: str | None = None
        self._grammar_backend: str | None = None
        self._draws_by_seed: bool | None = None
        self._takes_adapters = False
        self._interim_key: str | None = None
        self._pause_mode: PauseMode | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, request: GenerateRequest) -> AsyncIterator[EngineChunk]:
        """Streams chunks; closing the iterator early aborts the generation in the engine.

        Raises InvalidRequest for what the engine refuses, UnsupportedParameter for a constraint that it does not
        enforce, EngineUnavailable when it is down or dies meanwhile, EngineTimeout after a silence of the read
        timeout, or of the stall timeout once tokens have come, InvalidEngineReply for an answer that cannot be true,
        EngineFailed for everything else.
        """
        if request.sampling.constraint is not None and self._grammar_backend is None:
            await self._look_at_server()
        bounds = _bounds_of(request)
        parser = ReplyParser(bounds)
        over = False
        try:
            ids, sampling = await self._written(request)
            with await self._calls.request("POST", "/generate", self._body(request, ids, sampling)) as reply:
                if reply.status != HTTPStatus.OK:
                    raise refusal_of(reply.status, message_of(await reply.read()))
                if request.stream:
                    events = EventLines(bounds.max_bytes)
                    progress = Progress(reply, self._stall_seconds)
                    while not events.over and (part := await reply.part()):
                        for chunk in parser.parse_all(events.feed(part)):
                            # Before the yield: a reader that stops at the last chunk leaves nothing to abort.
                            over = parser.finished
                            progress.made()
                            yield chunk
                        if self._pause_mode is None:
                            progress.check()
                    reply.runs_out = events.over
                else:
                    chunk = parser.parse(await reply.read(bounds.max_bytes))
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

    async def _written(self, request: GenerateRequest) -> tuple[msgspec.Raw, msgspec.Raw]:
        """The request's ids and sampling parameters as JSON; on a thread where that takes more than a few
        milliseconds."""
        backend = self._grammar_backend

        def write() -> tuple[msgspec.Raw, msgspec.Raw]:
            sampling = msgspec.json.encode(sampling_body(request.sampling, backend))
            return msgspec.Raw(request.input_ids.json), msgspec.Raw(sampling)

        return await asyncio.to_thread(write) if _is_large(request) else write()

    def _body(self, request: GenerateRequest, ids: msgspec.Raw, sampling: msgspec.Raw) -> bytes:
        body: dict[str, Any] = {
            "rid": _engine_id(request.request_id),
            "input_ids": ids,
            "sampling_params": sampling,
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
        backend = await self._look_at_server()
        return EngineInfo(
            adapters=self._takes_adapters,
            model_path=model.model_path,
            weight_label=model.weight_version,
            grammar=ENFORCED.get(backend, frozenset()),
            draws_by_seed=bool(self._draws_by_seed),
        )

    async def draws_by_seed(self) -> bool:
        """SGLang takes every seed, and draws by it only with `--enable-deterministic-inference`."""
        if self._draws_by_seed is None:
            await self._look_at_server()
        return bool(self._draws_by_seed)

    async def _look_at_server(self) -> str:
        server = await self._look("/server_info", _ServerInfo)
        self._grammar_backend = server.grammar_backend or "none"
        self._draws_by_seed = server.enable_deterministic_inference
        self._takes_adapters = server.adapters_from_disk
        return self._grammar_backend

    async def _model_info(self) -> _ModelInfo:
        model = await self._look("/model_info", _ModelInfo)
        self._label = model.weight_version
        return model

    async def _look(self, path: str, kind: type[Info]) -> Info:
        with await self._control_calls.request("GET", path) as reply:
            content = await reply.read()
        if reply.status != HTTPStatus.OK:
            raise failure_of(reply.status, message_of(content))
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidEngineReply(f"its {path} cannot be read: {error}") from error

    async def ping(self, seconds: float) -> None:
        """SGLang answers `/model_info` beside its scheduler, the embedded engine beside its model thread."""
        try:
            async with asyncio.timeout(seconds):  # the connection included: a host that is cut off drops packets
                with await self._pings.request("GET", "/model_info", silence_seconds=seconds) as reply:
                    await reply.read()
        except TimeoutError as error:
            raise EngineTimeout(f"the engine did not answer within {seconds:g} s") from error

    def suspend(self, reason: str) -> None:
        self._calls.suspend(reason)
        self._control_calls.suspend(reason)

    def restore(self) -> None:
        self._calls.restore()
        self._control_calls.restore()

    async def healthy(self) -> bool:
        try:
            with await self._control_calls.request(
                "GET", "/health_generate", silence_seconds=HEALTH_SECONDS
            ) as reply:
                return reply.status == HTTPStatus.OK
        except (EngineUnavailable, EngineTimeout):
            return False

    async def aclose(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_SECONDS)
        await self._calls.aclose()
        await self._control_calls.aclose()
        await self._pings.aclose()

    async def _control(self, path: str, body: dict[str, Any], seconds: float = CONTROL_SECONDS) -> None:
        request = self._control_calls.request("POST", path, msgspec.json.encode(body), silence_seconds=seconds)
        with await request as reply:
            content = await reply.read()
        if reply.status != HTTPStatus.OK:
            raise failure_of(reply.status, message_of(content))


class Progress:
    """Watches that a streamed answer goes on once it has begun: by bytes, and by tokens where chunks come without."""

    def __init__(self, reply: Reply, stall_seconds: float) -> None:
        self._reply = reply
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._made_at: float | None = None

    def made(self) -> None:
        """New tokens came."""
        if self._made_at is None:
            self._reply.bound_silence(self._stall_seconds)
        self._made_at = self._loop.time()

    def check(self) -> None:
        """Raise EngineTimeout where chunks come, and no tokens."""
        if self._made_at is not None and self._loop.time() - self._made_at > self._stall_seconds:
            raise EngineTimeout(f"the engine stopped in the middle: no token came for {self._stall_seconds:g} s")


class EventLines:
    """Cut the data out of a stream of server-sent events, in whatever parts it comes. `over` after its last one.

    A line of more than `limit` bytes raises InvalidEngineReply: without its end it would fill the memory.
    """

    def __init__(self, limit: int = LARGEST_BODY) -> None:
        self._limit = limit
        self._line: list[bytes] = []
        self._size = 0
        self.over = False

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that this part completes."""
        first, *further = part.split(b"\n")
        self._line.append(first)
        self._size = self._size + len(first) if not further else len(further[-1])
        if self._size > self._limit:
            raise InvalidEngineReply(f"an event has more than {self._limit} bytes")
        if not further:
            return []
        lines = [b"".join(self._line), *further]
        self._line = [lines.pop()]
        events = [line[len(DATA) :].rstrip() for line in lines if line.startswith(DATA)]
        if DONE in events:
            self.over = True
            return events[: events.index(DONE)]
        return events


def _bounds_of(request: GenerateRequest) -> ReplyBounds:
    bounds = ReplyBounds(
        max_new_tokens=request.sampling.max_new_tokens,
        prompt_tokens=len(request.input_ids),
        per_token=1 + request.top_logprobs,
    )
    if request.vocabulary_size is None:
        return bounds
    return msgspec.structs.replace(bounds, vocabulary_size=request.vocabulary_size)


def _public_address(url: str) -> str:
    """The address without its user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _engine_id(request_id: str) -> str:
    """SGLang aborts every request whose id begins with the given one; with an end mark none begins with another."""
    return f"{request_id}/"


def _is_large(request: GenerateRequest) -> bool:
    sampling = request.sampling
    return (
        request.input_ids.unwritten > LARGE_IDS
        or len(sampling.logit_bias or ()) > LARGE_BIASES
        or (sampling.constraint is not None and len(sampling.constraint.text) > LARGE_CONSTRAINT)
    )


def sampling_body(sampling: SamplingParameters, grammar_backend: str | None = None) -> dict[str, Any]:
    """SGLang's `sampling_params`. The text options make its text say what the ids say, special tokens and all.

    Raises UnsupportedParameter for a constraint that the back end does not enforce.
    """
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
        constraint = constraint_for(sampling.constraint, grammar_backend)
        body[constraint.kind.value] = constraint.text
    return body
