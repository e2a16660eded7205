"""Which model a name stands for: a run's serving version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import msgspec

from proxy.auth.service import Principal
from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.errors import EngineUnavailable, ModelNotFound, StoreUnavailable
from proxy.runs.service import RunDirectory, RunView

_KEPT_SECONDS = 1.0
OWNER = "base-rl"


class ServingVersions(Protocol):
    """What the engine holds now (`serving.reconciler.SwapController`)."""

    @property
    def engine_ready(self) -> bool: ...

    def serving(self, run_id: RunId) -> int | None: ...

    def recheck_engine(self) -> None:
        """Ask the engine at once what it holds: a call has lost its connection."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and the version that answers for it now."""

    run: RunView
    version: int


class ModelCatalog:
    """A run's row is read again after a second; what serves is asked every time."""

    def __init__(
        self, runs: RunDirectory, swaps: ServingVersions, clock: Clock, *, outlives_store: bool = False
    ) -> None:
        """`outlives_store`: while the store is unavailable, a run is taken to be as it was last seen."""
        self._outlives_store = outlives_store
        self._runs = runs
        self._swaps = swaps
        self._clock = clock
        self._kept: dict[str, tuple[float, RunView]] = {}
        self._reading = asyncio.Lock()

    async def resolve(self, principal: Principal, name: str) -> ServedModel:
        """The model `name` of the key's run.

        Raises ModelNotFound for what is not served under this key, EngineUnavailable while nothing is.
        """
        if principal.run_id is None:
            raise ModelNotFound(
                f"this key belongs to no run, so it has no model {name!r}: call with a run or session key",
                param="model",
            )
        run = await self._run(principal.run_id)
        version = self._swaps.serving(run.id)
        if not self._swaps.engine_ready or version is None:
            _check_name(run, name, run.serving_version)
            raise EngineUnavailable(f"no engine serves the run {run.name!r} now", retry_after=2.0)
        _check_name(run, name, version)
        return ServedModel(run=run, version=version)

    async def listing(self, principal: Principal) -> list[dict[str, Any]]:
        """The models that `resolve` finds, as OpenAI lists them."""
        runs = [await self._run(principal.run_id)] if principal.run_id is not None else await self._runs.list_()
        return [
            {"id": name, "object": "model", "created": int(run.created_at), "owned_by": OWNER}
            for run in runs
            for name in self._names(run)
        ]

    def _names(self, run: RunView) -> list[str]:
        version = self._swaps.serving(run.id)
        if version is None:
            return [run.name]
        names = [run.name, f"{run.name}@latest", f"{run.name}@{version}"]
        return [*names, run.settings.model] if version == 0 and run.settings.model else names

    async def _run(self, run_id: str) -> RunView:
        run = self._fresh(run_id)
        if run is None:
            async with self._reading:  # of the calls that find it old at one time, one reads it
                run = self._fresh(run_id)
                if run is None:
                    now = self._clock()
                    try:
                        run = await self._runs.by_id(run_id)
                    except StoreUnavailable:
                        if not self._outlives_store or run_id not in self._kept:
                            raise
                        run = self._kept[run_id][1]
                    self._kept[run_id] = (now, run)
        return run

    def _fresh(self, run_id: str) -> RunView | None:
        kept = self._kept.get(run_id)
        if kept is None or not kept[0] <= self._clock() < kept[0] + _KEPT_SECONDS:
            return None
        return kept[1]


def _check_name(run: RunView, name: str, version: int) -> None:
    """Raises ModelNotFound unless `name` means this run at this version."""
    if name in (run.name, f"{run.name}@latest", f"{run.name}@{version}"):
        return
    if name in (run.base_model, run.settings.model, Path(run.base_model).name):
        if version == 0:
            return
        raise ModelNotFound(
            f"{name!r} is version 0 of the run {run.name!r}, which serves version {version}: ask for {run.name!r}",
            param="model",
        )
    asked = name.removeprefix(f"{run.name}@")
    if asked != name and asked.isdecimal():
        raise ModelNotFound(
            f"version {asked} of the run {run.name!r} is not loaded: it serves version {version}", param="model"
        )
    raise ModelNotFound(f"there is no model {name!r} for this key: its run is {run.name!r}", param="model")
