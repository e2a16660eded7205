"""What the proxy needs of an inference engine; `sglang.py` is the one adapter, as all speak SGLang's HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

import msgspec

from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import ConstraintKind, SamplingParameters


class EngineFinish(StrEnum):
    """Why generation ended. `stop`: a stop token or stop string; `length`: the token bound; `abort`: we asked."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """`in_place`: requests freeze and go on with their KV cache. `retract`: they go on with a rebuilt one.
    `abort`: they end with what they have."""

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `stream` False gives one chunk at the end, which is cheaper. `top_logprobs` is how many of the
    most probable tokens are reported with each one that is generated. `vocabulary_size` is the model's, padding
    included: an engine that answers an id beyond it is wrong; None where it is not known."""

    request_id: str
    input_ids: TokenIds
    sampling: SamplingParameters
    stream: bool = False
    top_logprobs: int = 0
    vocabulary_size: int | None = None


class LabelSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` of the whole request were produced by the weights labelled `label`."""

    label: str
    start: int
    end: int


class EngineChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens since the last chunk: ids and log-probabilities, of equal length.

    `top_logprobs` has for each of them the most probable (id, log-probability), best first, and is empty where they
    were not asked for. `finish` and `spans` (over all output tokens of the request) are set on the last chunk only.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: EngineFinish | None = None
    spans: tuple[LabelSpan, ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. `weight_label` is what was last loaded under a label, or its own default.
    `grammar` are the constraints that it enforces; a request with any other is refused. `draws_by_seed`: a request's
    seed decides what it draws; without, a seed changes nothing. `adapters`: `load_weights` takes a directory with an
    adapter in peft's form too, which is served over the base model that it names."""

    model_path: str
    weight_label: str
    grammar: frozenset[ConstraintKind] = frozenset()
    draws_by_seed: bool = False
    adapters: bool = False


class Engine(Protocol):
    """An inference server. Methods raise EngineUnavailable (down), EngineFailed (it refused), EngineTimeout."""

    @property
    def name(self) -> str:
        """What operators know it by: its address, without a password."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[EngineChunk]:
        """Streams chunks; closing the iterator early aborts the generation in the engine."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def load_weights(self, path: str, label: str) -> None:
        """Loads a Hugging Face directory (or an adapter's, see `EngineInfo`) in place of the serving weights and
        verifies that `label` is served.

        Call it between `pause` and `resume` for requests in flight to go on.
        """
        ...

    async def label_weights(self, label: str) -> None:
        """Names the weights that are loaded already, without touching requests in flight."""
        ...

    async def info(self) -> EngineInfo: ...

    async def draws_by_seed(self) -> bool:
        """What `info` says of it, looked up once for many calls."""
        ...

    async def ping(self, seconds: float) -> None:
        """Ask what the engine answers at any time, also while it is busy; on a connection of its own.

        Raises EngineTimeout where nothing comes for `seconds`, EngineUnavailable where nobody is there.
        """
        ...

    def suspend(self, reason: str) -> None:
        """Fail all calls in flight with EngineTimeout, and refuse further ones with EngineUnavailable."""
        ...

    def restore(self) -> None:
        """Take calls again after `suspend`."""
        ...

    async def healthy(self) -> bool:
        """True when the engine would generate now. Never raises."""
        ...

    async def aclose(self) -> None: ...
