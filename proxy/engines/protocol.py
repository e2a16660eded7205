"""The protocol between the proxy and an inference engine. `sglang.py` is its one implementation: every engine that
base-rl can use answers SGLang's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from proxy.contract.exchange import Offer, Place
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import SamplingParameters


class EngineFinish(StrEnum):
    """Why a generation ended: `stop` at a stop token or stop string, `length` at the bound on new tokens, `abort`
    because the proxy asked for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What a pause does to running requests. `in_place`: they freeze and later continue with their KV cache.
    `retract`: they return to the queue, and their KV cache is computed again. `abort`: they end with the tokens
    produced so far."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. With `stream` False the answer comes as one chunk at the end, which is cheaper.

    `top_logprobs` is the number of most probable tokens to report for every generated token. `vocabulary_size` is the
    model's, padding included; replies with larger token ids are refused. None: the size is unknown. `adapter` is the
    name of the LoRA adapter to generate with; None: the base model alone.
    """

    request_id: str
    input_ids: TokenIds
    sampling: SamplingParameters
    stream: bool = False
    top_logprobs: int = 0
    vocabulary_size: int | None = None
    adapter: str | None = None


class LabelSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The weights labelled `label` produced the output tokens `[start, end)` of the request.

    For a request with an adapter it is the adapter's name as the engine reports it. SGLang reports only the label of
    the base model there; the label is then the name that the request asked for.
    """

    label: str
    start: int
    end: int


class EngineChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens since the last chunk: ids and log-probabilities, of equal length.

    `top_logprobs` has the most probable (id, log-probability) pairs of each token, best first; it is empty unless the
    request asked for them. Only the last chunk has `finish` and `spans`, over all output tokens of the request.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: EngineFinish | None = None
    spans: tuple[LabelSpan, ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's description of itself. `weight_label` is the label of the last loaded weights, or the engine's own
    default. `adapters`: `load_weights` also accepts a directory with a LoRA adapter in peft's format, and serves it
    over the base model that its configuration names. `named_adapters`: `load_adapter` adds adapters to the loaded
    model by name. `adapter_names` are the adapters in memory; the engine may have put others aside, which it loads
    again when a request names them. `max_running` is the number of requests that it runs at once, `context_length`
    that of tokens in a prompt with its answer, `max_adapters` that of adapters in its memory; None: it does not
    report it. `is_float32`: it says that it computes with the numbers of float32 files as they are.
    `loads_between_steps`: it reads new weights while it generates, so a load needs no pause. `ranks` is the number of
    its processes that hold weights, which all join a trainer's process group."""

    model_path: str
    weight_label: str
    adapters: bool = False
    named_adapters: bool = False
    adapter_names: tuple[str, ...] = ()
    max_running: int | None = None
    context_length: int | None = None
    max_adapters: int | None = None
    is_float32: bool = False
    loads_between_steps: bool = False
    ranks: int = 1


class Engine(Protocol):
    """An inference server. Methods raise EngineUnavailable if it is down, EngineFailed if it refuses, EngineTimeout
    if it does not answer."""

    @property
    def name(self) -> str:
        """The name that operators see: the engine's address, without user and password."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[EngineChunk]:
        """Stream chunks; closing the iterator early aborts the generation in the engine."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation; its stream then ends with the tokens produced so far."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating until `resume`."""
        ...

    async def resume(self) -> None:
        """Continue generating; without a pause, do nothing."""
        ...

    async def load_weights(self, path: str, label: str) -> None:
        """Load a Hugging Face directory (or an adapter's, see `EngineInfo`), and verify that `label` is served.

        Call it between `pause` and `resume`, so that running requests continue with the new weights; an engine that
        `loads_between_steps` needs neither.
        """
        ...

    async def receive_weights(self, place: Place, offer: Offer, label: str) -> None:
        """Join a trainer's process group, receive the offered weights, leave the group, and verify that `label` is
        served. The group must have a place for each of the engine's `ranks`.

        Call it between `pause` and `resume` like `load_weights`. An engine that `loads_between_steps` keeps all
        tensors aside until they are complete, so after a failure it serves what it served before. Any other engine
        replaces its weights bucket by bucket, and holds a mixture after a failure; it then serves the label
        `receiving.RECEIVING_LABEL`, which is no version of any run, until weights are loaded whole.
        """
        ...

    async def label_weights(self, label: str) -> None:
        """Name the loaded weights without touching running requests."""
        ...

    async def load_adapter(self, path: str, name: str) -> None:
        """Load a LoRA adapter in peft's format beside the others, without a pause; requests then name it.

        Loading the same path under the same name again does nothing, so a call that timed out can be repeated. Raises
        EngineFailed if the engine refuses, for instance because the name stands for another path.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter once its running requests have ended; an unknown name does nothing.

        Call it when no more requests are sent to the name. SGLang would load it again for a later one, and loads no
        other adapter while it waits here.
        """
        ...

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> tuple[float, ...]:
        """Return the log-probability of each token after the first under the loaded weights, at temperature 1.

        No cached prefix is used. Raises AdapterNotLoaded if the engine does not hold the adapter, InvalidRequest if
        it refuses the tokens.
        """
        ...

    async def checksums(self) -> Mapping[str, str]:
        """Return the engine's checksums of the tensors that it holds, by its own names; none if it computes none, or
        if several processes hold parts of the tensors."""
        ...

    async def info(self) -> EngineInfo:
        """Ask the engine which weights it serves."""
        ...

    async def draws_by_seed(self) -> bool:
        """Return whether a request's seed decides its samples. The engine is asked once for all calls."""
        ...

    async def ping(self, seconds: float) -> None:
        """Send a request that even a busy engine answers at once, on a connection of its own.

        Raises EngineTimeout if nothing arrives for `seconds`, EngineUnavailable if nothing listens.
        """
        ...

    def suspend(self, reason: str) -> None:
        """Fail all running calls with EngineTimeout and refuse further ones with EngineUnavailable."""
        ...

    def restore(self) -> None:
        """Accept calls again after `suspend`."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...
