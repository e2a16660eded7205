"""The HTTP front: SGLang's native endpoints over the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.engines.common.http import ControlEndpoints, decode, outcome
from proxy.engines.common.wire import RequestRefused
from proxy.engines.embedded.adapters import holds_adapter, read_adapted
from proxy.engines.embedded.generate import GenerateEndpoint
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.scheduler import Scheduler
from proxy.engines.embedded.weights import read_directory, read_serialized
from proxy.engines.embedded.wire import TensorUpdate

# A model thread that ends no step for this long is not healthy: as long as SGLang's own health check waits.
_HEALTH_SECONDS = 20.0

_Result = TypeVar("_Result")


def create_app(model: ServedModel, *, weight_label: str, max_running: int, max_total_tokens: int) -> Starlette:
    """Return the application; its lifespan runs the model thread."""
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
    """The control endpoints' engine (`common.http.ControlledEngine`). All changes happen in the model thread, between
    two steps."""

    scheduler: Scheduler

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._is_updating = False
        """Between `/begin_weight_update` and `/end_weight_update`; only then are tensors accepted, as in SGLang."""

    def routes(self) -> list[Route]:
        """Return all endpoints."""
        return [
            Route("/generate", GenerateEndpoint(self._model, lambda: self.scheduler), methods=["POST"]),
            Route("/begin_weight_update", self._begin_update, methods=["POST"]),
            Route("/update_weights_from_tensor", self._update_from_tensor, methods=["POST"]),
            Route("/end_weight_update", self._end_update, methods=["POST"]),
            *ControlEndpoints(self).routes(),
        ]

    async def load_directory(self, path: str, label: str | None) -> None:
        # The files are read while requests continue; only the copy into the model stops them.
        read = read_adapted if holds_adapter(path) else read_directory
        tensors = await asyncio.to_thread(read, path)
        await self._between_steps(partial(self.scheduler.load, tensors, label=label, complete=True))
        self._model.path = path

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
            "enable_deterministic_inference": True,  # a seed decides the samples of its request
            "adapters_from_disk": True,
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
            tensors = await asyncio.to_thread(read_serialized, body.serialized_named_tensors)
            load = partial(self.scheduler.load, tensors, label=body.weight_version, complete=False)
            await self._between_steps(load)
        except RequestRefused as error:
            return outcome(success=False, message=str(error))
        return outcome(success=True, message="Success")

    async def _end_update(self, _: Request) -> Response:
        if not self._is_updating:
            return outcome(success=False, message="No weight update has begun.")
        self._is_updating = False
        return outcome(success=True, message="Success")
