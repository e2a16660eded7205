"""The adapter of every engine: a client of SGLang's native HTTP API, which the embedded and scripted engines answer
too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from proxy.contract.exchange import Offer, Place
from proxy.engines.connections import Connections
from proxy.engines.descriptions import Checksums, ModelInfo, ServedModels, ServerInfo
from proxy.engines.generations import GenerationClient, PrefixKeys
from proxy.engines.protocol import EngineChunk, EngineInfo, GenerateRequest, PauseMode
from proxy.engines.receiving import RECEIVING_LABEL, receive
from proxy.engines.replies import failure_of, message_of, refusal_of
from proxy.engines.scores import read_scores, score_body
from proxy.engines.sglang_adapters import check_for_sglang
from proxy.errors import (
    EngineFailed,
    EngineTimeout,
    InvalidEngineReply,
)
from proxy.settings import ConfigurationError, EngineSettings

# Control calls at once: a swap makes a handful; the rest are aborts of generations whose clients have gone.
_CONTROL_CALLS = 16
# Longest wait for an abort, which every engine answers without computing anything.
_ABORT_SECONDS = 5.0
# Longest wait for a weight update or a pause: reading large weights from a network file system takes a minute.
_CONTROL_SECONDS = 120.0

_Info = TypeVar("_Info")


class SglangEngine:
    """An engine at `url`, with up to `settings.max_concurrency` generations at once; further ones wait.

    Prompts are computed whole by the weights that their turns name: `generations` chooses keys for SGLang's prefix
    cache, and sends requests again whose prompts a swap has interrupted.
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
                is_excused=lambda: self._generations.is_paused,
            )
        except ValueError as error:
            raise ConfigurationError(f"engine.url: {error}") from error
        self._name = public_address(address)
        # A pool of their own: a weight update must not wait until generations end and free a connection.
        self._control_calls = Connections(
            address, limit=_CONTROL_CALLS, connect_seconds=connect, silence_seconds=_CONTROL_SECONDS
        )
        # And one for pings, which `suspend` leaves open: they notice that the engine answers again.
        self._pings = Connections(address, limit=1, connect_seconds=connect, silence_seconds=connect)
        self._keys = PrefixKeys()
        self._generations = GenerationClient(
            self._calls,
            self._keys,
            stall_seconds=min(settings.stall_timeout_seconds, settings.read_timeout_seconds),
            send_abort=self._send_abort,
            read_label=self._model_info,
            read_grammar_backend=self._known_grammar_backend,
        )
        self._grammar_backend: str | None = None
        self._draws_by_seed: bool | None = None
        self._takes_adapters = False
        self._names_adapters = False
        self._max_adapters: int | None = None
        self._max_running: int | None = None
        self._context_length: int | None = None
        self._is_float32 = False
        self._loads_between_steps = False
        self._ranks = 1
        self._pause_mode: PauseMode | None = None

    @property
    def name(self) -> str:
        return self._name

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineChunk]:
        """Stream chunks; closing the iterator early aborts the generation in the engine.

        A request without a token when the weights change is sent again. Raises InvalidRequest if the engine refuses
        it, UnsupportedParameter for a constraint that it does not enforce, AdapterNotLoaded without the request's
        adapter, EngineUnavailable if it is down or dies meanwhile, EngineTimeout after a silence of the read timeout,
        or of the stall timeout once tokens have come, InvalidEngineReply for a reply that cannot be true, and
        EngineFailed for everything else.
        """
        return self._generations.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._generations.abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        if mode is not PauseMode.ABORT:  # which ends them all
            await self._generations.prepare_pause()
        self._pause_mode, self._generations.is_paused = mode, True
        try:
            await self._control("/pause_generation", {"mode": mode.value})
        except BaseException:
            self._generations.resumed()
            raise
        if mode is not PauseMode.ABORT:
            self._generations.paused()

    async def resume(self) -> None:
        self._pause_mode, self._generations.is_paused = None, False
        try:
            await self._control("/continue_generation", {})
        finally:
            self._generations.resumed()

    async def load_weights(self, path: str, label: str) -> None:
        """Load a directory and verify that the engine serves `label`. Raises EngineFailed if it does not."""
        # Retracted requests would find KV entries of the old weights in the cache, so it is flushed. Frozen requests
        # continue with their entries and need the cache as it is.
        flush = self._pause_mode is not PauseMode.IN_PLACE
        body = {"model_path": path, "weight_version": label, "flush_cache": flush}
        refusal: EngineFailed | None = None
        try:
            await self._control("/update_weights_from_disk", body)
        except EngineFailed as error:
            # SGLang also answers 400 if it has updated its weights and only could not flush its cache. The label that
            # it reports afterwards decides.
            refusal = error
        await self._check_served(label, f"the weights in {path}", refusal)

    async def receive_weights(self, place: Place, offer: Offer, label: str) -> None:
        """Receive a trainer's weights through its process group, and verify that the engine serves `label`.

        SGLang puts each bucket into its model when it has come. Before the first one the engine therefore gets a
        label that is no version of any run: if the trainer dies then, nobody takes the mixture for a version.
        """
        server = await self._read("/server_info", ServerInfo)
        flush = self._pause_mode is not PauseMode.IN_PLACE  # for the same reason as in `load_weights`
        try:
            refusal = await receive(self._control, server, place, offer, label=label, flush_cache=flush)
        except BaseException:
            # The prefixes that running requests compute with a mixture are not those of the label before, which may
            # be loaded again.
            self._keys.served(RECEIVING_LABEL)
            raise
        await self._check_served(label, "the trainer's weights", refusal)

    async def _check_served(self, label: str, what: str, refusal: EngineFailed | None) -> None:
        served = (await self._model_info()).weight_version
        if served != label:
            reason = refusal.message if refusal is not None else f"it serves {served!r} afterwards"
            raise EngineFailed(f"the engine did not take {what}: {reason}") from refusal

    async def label_weights(self, label: str) -> None:
        """Name the loaded weights; running requests continue, which SGLang's default would abort."""
        await self._control("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def load_adapter(self, path: str, name: str) -> None:
        await self._read_server_info()
        if not self._takes_adapters:  # base-rl's own engines check adapters themselves
            await asyncio.to_thread(check_for_sglang, path)
        try:
            await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except EngineFailed:
            # SGLang also refuses a name that it holds already, as after a call whose answer was lost.
            if (await self._adapter_paths()).get(name) != path:
                raise

    async def unload_adapter(self, name: str) -> None:
        try:
            await self._control("/unload_lora_adapter", {"lora_name": name})
        except EngineFailed:
            # Engines refuse a name that they do not hold, as after a call whose answer was lost.
            if name in await self._adapter_paths():
                raise

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> tuple[float, ...]:
        # A key that no other request has: a cached prefix may be of other weights, which the score should reveal.
        body = score_body(ids, adapter, prefix_key=uuid.uuid4().hex)
        with await self._control_calls.request("POST", "/generate", body) as reply:
            content = await reply.read()
        if reply.status != HTTPStatus.OK:
            raise refusal_of(reply.status, message_of(content))
        return read_scores(content, ids)

    async def checksums(self) -> Mapping[str, str]:
        body = msgspec.json.encode({"action": "checksum"})
        with await self._control_calls.request("POST", "/weights_checker", body) as reply:
            content = await reply.read()
        if reply.status != HTTPStatus.OK:  # engines other than SGLang and base-rl's own have no such endpoint
            return {}
        try:
            ranks = msgspec.json.decode(content, type=Checksums).ranks
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidEngineReply(f"its checksums cannot be read: {error}") from error
        return ranks[0].checksums if len(ranks) == 1 else {}

    async def _adapter_paths(self) -> dict[str, str]:
        """Return the adapters in the engine's memory: their paths by name."""
        models = await self._read("/v1/models", ServedModels)
        return {each.id: each.root for each in models.data if each.parent is not None}

    async def info(self) -> EngineInfo:
        model = await self._model_info()
        await self._read_server_info()
        return EngineInfo(
            model_path=model.model_path,
            weight_label=model.weight_version,
            adapters=self._takes_adapters,
            named_adapters=self._names_adapters,
            adapter_names=tuple(await self._adapter_paths()) if self._names_adapters else (),
            max_running=self._max_running,
            context_length=self._context_length,
            max_adapters=self._max_adapters if self._names_adapters else None,
            is_float32=self._is_float32,
            loads_between_steps=self._loads_between_steps,
            ranks=self._ranks,
        )

    async def draws_by_seed(self) -> bool:
        """Return whether a seed decides the samples: SGLang accepts every seed, and uses it only if it runs with
        `--enable-deterministic-inference`."""
        if self._draws_by_seed is None:
            await self._read_server_info()
        return bool(self._draws_by_seed)

    async def _known_grammar_backend(self) -> str:
        if self._grammar_backend is None:
            await self._read_server_info()
        return self._grammar_backend or "none"

    async def _read_server_info(self) -> None:
        server = await self._read("/server_info", ServerInfo)
        self._grammar_backend = server.grammar_backend or "none"
        self._draws_by_seed = server.enable_deterministic_inference
        self._takes_adapters = server.adapters_from_disk
        self._names_adapters = bool(server.enable_lora)
        self._generations.shares_prefixes = not server.whole_prompts
        self._is_float32 = server.dtype == "float32" and server.quantization is None
        self._loads_between_steps = server.loads_between_steps
        self._ranks = server.ranks
        self._max_running = server.max_running
        self._context_length = server.context_length
        self._max_adapters = server.max_loaded_loras

    async def _model_info(self) -> ModelInfo:
        model = await self._read("/model_info", ModelInfo)
        self._keys.served(model.weight_version)
        return model

    async def _read(self, path: str, kind: type[_Info]) -> _Info:
        with await self._control_calls.request("GET", path) as reply:
            content = await reply.read()
        if reply.status != HTTPStatus.OK:
            raise failure_of(reply.status, message_of(content))
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidEngineReply(f"its {path} cannot be read: {error}") from error

    async def ping(self, seconds: float) -> None:
        # `/model_info` never waits for the model: SGLang answers it beside its scheduler, the embedded engine beside
        # its model thread.
        try:
            # The bound includes the connection attempt: a host that is cut off drops packets without an answer.
            async with asyncio.timeout(seconds):
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

    async def aclose(self) -> None:
        await self._generations.aclose()
        await self._calls.aclose()
        await self._control_calls.aclose()
        await self._pings.aclose()

    async def _send_abort(self, engine_id: str) -> None:
        await self._control("/abort_request", {"rid": engine_id}, seconds=_ABORT_SECONDS)

    async def _control(self, path: str, body: dict[str, Any], seconds: float = _CONTROL_SECONDS) -> None:
        request = self._control_calls.request("POST", path, msgspec.json.encode(body), silence_seconds=seconds)
        with await request as reply:
            content = await reply.read()
        if reply.status == HTTPStatus.NOT_FOUND:
            raise EngineFailed(f"the engine has no endpoint {path}")
        if reply.status != HTTPStatus.OK:
            raise failure_of(reply.status, message_of(content))


def public_address(url: str) -> str:
    """Return the address without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
