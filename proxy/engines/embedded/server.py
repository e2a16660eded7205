"""The HTTP front: SGLang's native endpoints over the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.engines.common.http import ControlEndpoints, decode, outcome
from proxy.engines.common.wire import AdapterLoad, RequestRefused, WeightsCheck
from proxy.engines.embedded.adapters import holds_adapter, read_adapted, read_adapter
from proxy.engines.embedded.generate import GenerateEndpoint
from proxy.engines.embedded.lora import Adapter
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.receiving import WeightReceiver
from proxy.engines.embedded.residency import AdapterLimits, AdapterRegistry
from proxy.engines.embedded.scheduler import Scheduler
from proxy.engines.embedded.weights import WeightsRefused, checksums, read_directory, read_serialized
from proxy.engines.embedded.wire import TensorUpdate

# A model thread that ends no step for this long is not healthy: as long as SGLang's own health check waits.
_HEALTH_SECONDS = 20.0

Tensors = Mapping[str, torch.Tensor]

_Result = TypeVar("_Result")


def create_app(
    model: ServedModel,
    *,
    weight_label: str,
    max_running: int,
    max_total_tokens: int,
    adapters: AdapterLimits,
) -> Starlette:
    """Return the application; its lifespan runs the model thread."""
    engine = EmbeddedEngine(model, adapters)

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
    """The control endpoints' engine (`common.http.ControlledEngine`). All changes happen in the model thread, between
    two steps."""

    scheduler: Scheduler

    def __init__(self, model: ServedModel, limits: AdapterLimits) -> None:
        self._model = model
        self._limits = limits
        self._adapters = AdapterRegistry(self._read_adapter, self._forget_adapter, limit=limits.loaded)
        self._base: str | None = model.path
        """The loaded weights as adapters name them; None while they change, and if no directory has them."""
        self._is_updating = False
        """Between `/begin_weight_update` and `/end_weight_update`; only then are tensors accepted, as in SGLang."""
        self._receiver = WeightReceiver(lambda: self._is_updating, abort_all=partial(self.abort, None))

    def routes(self) -> list[Route]:
        """Return all endpoints."""
        return [
            Route(
                "/generate", GenerateEndpoint(self._model, lambda: self.scheduler, self._adapters), methods=["POST"]
            ),
            Route("/begin_weight_update", self._begin_update, methods=["POST"]),
            Route("/update_weights_from_tensor", self._update_from_tensor, methods=["POST"]),
            Route("/end_weight_update", self._end_update, methods=["POST"]),
            *self._receiver.routes(),
            Route("/weights_checker", self._check_weights, methods=["GET", "POST"]),
            *ControlEndpoints(self).routes(),
        ]

    async def load_directory(self, path: str, label: str | None) -> None:
        is_adapter = holds_adapter(path)
        with self._base_changes(None if is_adapter else path):
            await self._load(partial(read_adapted if is_adapter else read_directory, path), label, complete=True)
        self._model.path = path

    async def _load(self, read: Callable[[], Tensors], label: str | None, *, complete: bool) -> None:
        """Read and copy weights while requests continue, and exchange them for the model's between two steps.

        The memory holds them twice meanwhile. Raises WeightsRefused, with nothing changed, if they do not fit.
        """
        weights = await asyncio.to_thread(lambda: self._model.prepare(read(), complete=complete))
        await self._between_steps(partial(self.scheduler.load, weights, label=label))
        await asyncio.to_thread(weights.release)

    async def load_adapter(self, body: AdapterLoad) -> None:
        await self._adapters.load(body)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    def adapters(self) -> Mapping[str, str]:
        return self._adapters.paths()

    async def _read_adapter(self, name: str, path: str) -> Adapter:
        base, layers = self._base, self._model.layers
        if base is None:
            raise WeightsRefused(
                f"{path} is an adapter, and the weights that this engine serves are not those of a base model: load "
                "the base model by /update_weights_from_disk first"
            )
        adapter = await asyncio.to_thread(
            read_adapter,
            name,
            path,
            base=base,
            shapes=layers.shapes,
            max_rank=self._limits.rank,
            device=self._model.device,
        )
        await self._between_steps(partial(layers.attach, adapter.pairs))
        if self._base != base:
            raise WeightsRefused(f"the weights of {base} were replaced while {path} was read")
        return adapter

    async def _forget_adapter(self, adapter: Adapter) -> None:
        await self._between_steps(partial(self._model.layers.forget, adapter))

    @contextmanager
    def _base_changes(self, base: str | None) -> Iterator[None]:
        """Replace the base model by `base` within this block; after an error the one before stands.

        Raises WeightsRefused while adapters are loaded, unless the base is the same one.
        """
        before = self._base
        if not self._adapters.is_empty and base != before:
            raise WeightsRefused("LoRA adapters of the loaded weights are in use: unload them by name first")
        # None meanwhile: an adapter that is being read now would otherwise be taken for one of the new weights.
        self._base = before if base == before else None
        try:
            yield
        except BaseException:
            self._base = before
            raise
        self._base = base

    async def rename_weights(self, label: str, *, abort_all: bool) -> None:
        def rename() -> None:
            if abort_all:
                self.scheduler.abort(None)
            self.scheduler.weight_label = label

        await self._between_steps(rename)

    async def pause(self, mode: str) -> None:
        await self._between_steps(partial(self.scheduler.pause, mode))

    async def resume(self) -> None:
        await self._between_steps(self.scheduler.resume)

    async def abort(self, rid: str | None) -> None:
        await self._between_steps(partial(self.scheduler.abort, rid))

    async def flush_cache(self) -> bool:
        return await self._between_steps(self.scheduler.flush)

    async def model_info(self) -> dict[str, Any]:
        config = self._model.network.config
        return {
            "model_path": self._model.path,
            "is_generation": True,
            "weight_version": self.scheduler.weight_label,
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    async def server_info(self) -> dict[str, Any]:
        return {
            "model_path": self._model.path,
            "weight_version": self.scheduler.weight_label,
            "context_length": self._model.context,
            "grammar_backend": "none" if self._model.grammars is None else "llguidance",
            "dtype": str(self._model.network.dtype).removeprefix("torch."),
            "enable_deterministic_inference": True,  # a seed decides the samples of its request
            "adapters_from_disk": True,
            "whole_prompts": True,
            "loads_between_steps": True,
            "enable_lora": self._limits.loaded > 0,
            "max_loaded_loras": self._limits.loaded,
            "max_lora_rank": self._limits.rank,
            "max_running_requests": self.scheduler.max_running,
            **await self._between_steps(self.scheduler.counts),
        }

    async def is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._between_steps(self.scheduler.counts)
        except TimeoutError:
            return False
        return True

    async def _between_steps(self, command: Callable[[], _Result]) -> _Result:
        return await asyncio.wrap_future(self.scheduler.submit(command))

    async def _begin_update(self, _: Request) -> Response:
        if self._is_updating:
            return outcome(success=False, message="A weight update has begun already.")
        self._is_updating = True
        return outcome(success=True, message="Success")

    async def _update_from_tensor(self, request: Request) -> Response:
        if not self._is_updating:
            return outcome(success=False, message="Call /begin_weight_update first.")
        try:
            body = decode(await request.body(), TensorUpdate)
            read = partial(read_serialized, body.serialized_named_tensors)
            with self._base_changes(None):
                await self._load(read, body.weight_version, complete=False)
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        return outcome(success=True, message="Success")

    async def _check_weights(self, request: Request) -> Response:
        """Answer SGLang's action `checksum`, the only one that leaves the weights alone."""
        try:
            if decode(await request.body() or b"{}", WeightsCheck).action != "checksum":
                raise RequestRefused("the only action is checksum.")
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        found = await asyncio.to_thread(checksums, self._model.network)
        return outcome(success=True, message="Success.", ranks=[{"checksums": found}])

    async def _end_update(self, _: Request) -> Response:
        if not self._is_updating:
            return outcome(success=False, message="No weight update has begun.")
        try:
            staged = self._receiver.take()
            if staged is not None:
                with self._base_changes(None):
                    await self._load(staged.checked, staged.label, complete=True)
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        finally:
            self._is_updating = False
        return outcome(success=True, message="Success")
