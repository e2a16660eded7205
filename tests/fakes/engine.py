"""A fake of the `Engine` protocol, which answers from a function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from proxy.contract.exchange import Offer, Place
from proxy.engines.grammars import constraint_for
from proxy.engines.protocol import (
    EngineChunk,
    EngineFinish,
    EngineInfo,
    GenerateRequest,
    LabelSpan,
    PauseMode,
)
from proxy.errors import AdapterNotLoaded, BaseRlError, EngineFailed, EngineTimeout, EngineUnavailable

Script = Callable[[GenerateRequest], Sequence[int]]


class FakeEngine:
    """`script` returns the output ids of a request, stop token included; every log-probability is -0.5. The most
    probable tokens at any position are the generated one and the ids that follow it.

    If `error` is set, generation raises it after `error_after` tokens. If `down`, the engine is unreachable. `calls`
    records all control calls. While `gate` is cleared, generation stops before its last token and `held` is set. An
    abort ends a stopped generation with the tokens produced so far, unless the engine is `deaf`. Constraints are
    refused as by an engine with `grammar_backend`, and not obeyed. `seeded` is the answer of `draws_by_seed`.

    `loras` are the loaded adapters, paths by name. A request that names one gets spans with that name; with
    `ignores_adapters` they have the base's label. Every score is the one that `scores` has for the adapter's path,
    for None as the base, or -1. `sums` are the checksums of the tensors that it holds.
    """

    def __init__(
        self,
        script: Script,
        *,
        label: str = "default",
        model_path: str = "fake-model",
        address: str = "fake://engine",
    ) -> None:
        self._address = address
        self.script = script
        self.label = label
        self.model_path = model_path
        self.down = False
        self.hung = False
        self.error: BaseRlError | None = None
        self.error_after = 0
        self.paused = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.held = asyncio.Event()
        self.deaf = False
        self.grammar_backend = "llguidance"
        self.seeded = True
        self.adapters = True
        self.named_adapters = True
        self.max_adapters: int | None = None
        self.loras: dict[str, str] = {}
        self.scores: dict[str | None, float] = {}
        self.ignores_adapters = False
        self.is_float32 = False
        self.loads_between_steps = False
        self.sums: dict[str, str] = {}
        self.calls: list[tuple[str, object]] = []
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    @property
    def name(self) -> str:
        return self._address

    def _reach(self) -> None:
        if self.down:
            raise EngineUnavailable("the fake engine is down")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[EngineChunk]:
        self._reach()
        if request.sampling.constraint is not None:
            constraint_for(request.sampling.constraint, self.grammar_backend)
        self._require(request.adapter)
        self.requests.append(request)
        ids = list(self.script(request))
        finish = EngineFinish.STOP
        if len(ids) > request.sampling.max_new_tokens:
            ids, finish = ids[: request.sampling.max_new_tokens], EngineFinish.LENGTH
        spans: list[LabelSpan] = []
        done = False
        try:
            for index, token in enumerate(ids):
                if self.error is not None and index >= self.error_after:
                    raise self.error
                if index == len(ids) - 1 and await self._aborted_at_gate(request.request_id):
                    ids, finish = ids[:index], EngineFinish.ABORT
                    break
                label = self.label if request.adapter is None or self.ignores_adapters else request.adapter
                if spans and spans[-1].label == label:
                    spans[-1] = LabelSpan(label=label, start=spans[-1].start, end=index + 1)
                else:
                    spans.append(LabelSpan(label=label, start=index, end=index + 1))
                if request.stream and index < len(ids) - 1:
                    yield _chunk(request, [token])
                    await asyncio.sleep(0)
            done = True
            tail = ids if not request.stream else [] if finish is EngineFinish.ABORT else ids[-1:]
            yield _chunk(request, tail, finish=finish, spans=tuple(spans))
        finally:
            if not done:
                self.aborted.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if not self.deaf:
            self._ends.setdefault(request_id, asyncio.Event()).set()

    async def _aborted_at_gate(self, request_id: str) -> bool:
        if self.gate.is_set():
            return False
        end = self._ends.setdefault(request_id, asyncio.Event())
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, end)]
        self.held.set()
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return end.is_set()

    async def pause(self, mode: PauseMode) -> None:
        self._reach()
        self.calls.append(("pause", mode))

    async def resume(self) -> None:
        self._reach()
        self.calls.append(("resume", None))

    async def load_weights(self, path: str, label: str) -> None:
        self._reach()
        self.calls.append(("load_weights", (path, label)))
        self.model_path = path
        self.label = label

    async def receive_weights(self, place: Place, offer: Offer, label: str) -> None:
        self._reach()
        self.calls.append(("receive_weights", (place, offer, label)))
        self.label = label

    async def label_weights(self, label: str) -> None:
        self._reach()
        self.calls.append(("label_weights", label))
        self.label = label

    async def load_adapter(self, path: str, name: str) -> None:
        self._reach()
        self.calls.append(("load_adapter", (path, name)))
        if self.loras.setdefault(name, path) != path:
            raise EngineFailed(f"the fake engine holds other weights as {name}")

    async def unload_adapter(self, name: str) -> None:
        self._reach()
        self.calls.append(("unload_adapter", name))
        self.loras.pop(name, None)

    async def score(self, ids: Sequence[int], adapter: str | None = None) -> tuple[float, ...]:
        self._reach()
        self._require(adapter)
        path = None if adapter is None or self.ignores_adapters else self.loras[adapter]
        return (self.scores.get(path, -1.0),) * (len(ids) - 1)

    def _require(self, adapter: str | None) -> None:
        if adapter is not None and adapter not in self.loras:
            raise AdapterNotLoaded(f"the fake engine does not hold {adapter}")

    async def checksums(self) -> Mapping[str, str]:
        self._reach()
        return self.sums

    async def info(self) -> EngineInfo:
        self._reach()
        return EngineInfo(
            model_path=self.model_path,
            weight_label=self.label,
            adapters=self.adapters,
            named_adapters=self.named_adapters,
            adapter_names=tuple(self.loras),
            max_adapters=self.max_adapters,
            is_float32=self.is_float32,
            loads_between_steps=self.loads_between_steps,
        )

    async def draws_by_seed(self) -> bool:
        self._reach()
        return self.seeded

    async def ping(self, seconds: float) -> None:
        self._reach()
        if self.hung:
            await asyncio.sleep(seconds)
            raise EngineTimeout("the fake engine hangs")

    def suspend(self, reason: str) -> None:
        self.calls.append(("suspend", reason))

    def restore(self) -> None:
        self.calls.append(("restore", None))

    async def aclose(self) -> None:
        self.calls.append(("aclose", None))


def _chunk(
    request: GenerateRequest,
    ids: Sequence[int],
    *,
    finish: EngineFinish | None = None,
    spans: tuple[LabelSpan, ...] = (),
) -> EngineChunk:
    ranks = range(request.top_logprobs)
    return EngineChunk(
        output_ids=tuple(ids),
        logprobs=(-0.5,) * len(ids),
        top_logprobs=tuple(tuple((token + rank, -0.5 - rank) for rank in ranks) for token in ids) if ranks else (),
        finish=finish,
        spans=spans,
    )
