"""Find the run of a key, the names of its models, and the version and engine that answer for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from proxy.auth.access import Principal, Right, covers, has_right
from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.trajectory import Purpose
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import Engine
from proxy.errors import (
    BaseRlError,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    StoreUnavailable,
)
from proxy.log import logger
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import SessionContext
from proxy.versions.release import Track

# How old a run's row may be. A change of the run's settings reaches the next calls this late.
_FRESH_SECONDS = 1.0


_LOG = logger(__name__)

# Longer numbers are no versions, and no integer of the database.
_VERSION_DIGITS = 9


class ServingVersions(Protocol):
    """The serving side: engines and the versions that they hold (`proxy.serving`)."""

    def serving(self, run_id: RunId) -> int | None:
        """Return the version of the run that new calls are answered with; None while no engine serves the run."""
        ...

    def find_place(self, run_id: RunId, session_id: str | None = None) -> EnginePlace | None:
        """Return the engine for the session's next call; None while no engine serves the run."""
        ...

    def track(self, run_id: RunId, session_id: str, key_id: str) -> Track | None:
        """Return the track of a session that another version than the serving one answers; None for all others."""
        ...

    def shadow(self, run_id: RunId) -> int | None:
        """Return the candidate that answers a share of the run's prompts unseen; None without one."""
        ...

    def another_place(self, run_id: RunId, lost: EnginePlace) -> EnginePlace | None:
        """Return another engine that serves the run; None if there is none."""
        ...

    async def require_version(self, run: RunView, version: int) -> None:
        """Raise ModelNotFound, naming the versions that can be asked for, unless `older_place` may serve this one."""
        ...

    async def older_place(self, run: RunView, version: int, session_id: str) -> EnginePlace:
        """Return the engine for a session's next call of a version that is not the serving one, after loading it if
        need be. Raise ModelNotFound, and EngineUnavailable while no engine can take it."""
        ...

    def unserved_reason(self, run: RunView) -> str:
        """Return why no engine serves the run now, and what to do."""
        ...

    def recheck_engine(self, engine: Engine) -> None:
        """Ask the engine at once which version it holds, because a call has lost its connection."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the version that answers: the one that serves the run now, or another one that the call named.

    `is_named`: the call named the version, so it is answered by no other.
    """

    run: RunView
    version: int
    is_older: bool = False
    is_named: bool = False


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The engine that answers a call. `may_move`: if it is down, any engine that serves the run may answer."""

    place: EnginePlace
    may_move: bool


class ModelCatalog:
    """Finds the run of a key, and what serves it now. Rows of runs are a second old at most."""

    def __init__(
        self, runs: RunDirectory, swaps: ServingVersions, clock: Clock, *, outlives_store: bool = False
    ) -> None:
        """`outlives_store`: while the store is unavailable, use a run's row as it was last read."""
        self._outlives_store = outlives_store
        self._runs = runs
        self._swaps = swaps
        self._clock = clock
        self._rows: dict[str, tuple[float, RunView]] = {}
        """Runs by id, with the time at which each was read."""
        self._ids: dict[str, str] = {}
        """Ids of runs by name, for the keys of projects. A run keeps its name."""
        self._reading = asyncio.Lock()

    async def run_of(self, principal: Principal, body: bytes) -> RunView:
        """Return the run that a call is for: the key's own, or for the key of a project the one that `model` names in
        the body. Raise ModelNotFound for a key that may not call models, and for another project's run."""
        if principal.run_id is not None:
            return await self.run(principal.run_id)
        if not has_right(principal, Right.CALL):
            raise ModelNotFound(
                "this key belongs to no run, so it has no model: call with the key of a run, session or project",
                param="model",
            )
        name = _named_model(body)
        run = await self._called(name.partition("@")[0])
        if run is None or not covers(principal, run):
            raise ModelNotFound(
                f"there is no model {name!r} for this key: ask for one that `GET /v1/models` lists", param="model"
            )
        return run

    async def run(self, run_id: str) -> RunView:
        """Return a run by its id, read at most a second ago. Raise NotFound."""
        run = self._fresh(run_id)
        return await self._read(run_id) if run is None else run

    async def served(self, run: RunView, name: str) -> ServedModel:
        """Return the version that answers for `run` if `name` means the run, or the version that `name` names.

        Raise ModelNotFound for another name and for a version that cannot be asked for, EngineUnavailable while no
        engine serves the run, RunArchived.
        """
        run.refuse_archived()
        # Asked for every call, and not remembered with the run's row: a swap must reach the next call.
        version = self._swaps.serving(run.id)
        if version is None:
            # A wrong name is a 404 even while the engine is down: waiting would not help that client.
            if _named_version(run, name) is None:
                _check_name(run, name, run.serving_version)
            raise self._unserved(run)
        named = _named_version(run, name)
        if named is None or named == version:
            _check_name(run, name, version)
            return ServedModel(run=run, version=version, is_named=named is not None)
        await self._swaps.require_version(run, named)
        return ServedModel(run=run, version=named, is_older=True, is_named=True)

    async def place(self, served: ServedModel, session: SessionContext, key_id: str) -> Placement:
        """Return the engine for the session's next call, which has the key `key_id`. Raise EngineUnavailable while
        none serves the version."""
        run, session_id = served.run, session.id
        if served.is_older:
            place = await self._swaps.older_place(run, served.version, session_id)
            return Placement(place=place, may_move=False)
        if not served.is_named and session.purpose is Purpose.TRAIN:
            tracked = await self._tracked(run, session_id, key_id)
            if tracked is not None:
                return tracked
        found = self._swaps.find_place(run.id, session_id)
        if found is None:  # lost since the call began
            raise self._unserved(run)
        return Placement(place=found, may_move=True)

    async def _tracked(self, run: RunView, session_id: str, key_id: str) -> Placement | None:
        """Return where the canary, or the version that the session is held on, answers; None if the serving version
        does."""
        track = self._swaps.track(run.id, session_id, key_id)
        if track is None:
            return None
        try:
            place = await self._swaps.older_place(run, track.version, session_id)
        except BaseRlError as error:
            if not track.is_canary:
                raise
            # Agents must not notice a trial, and the gate tells that no session of the canary comes.
            _LOG.warning("canary not served", run=run.name, version=track.version, error=error.message)
            return None
        return Placement(place=place, may_move=track.is_canary)

    def _unserved(self, run: RunView) -> EngineUnavailable:
        return EngineUnavailable(self._swaps.unserved_reason(run), retry_after=2.0)

    async def visible_to(self, principal: Principal) -> list[RunView]:
        """Return the runs in the key's scope, without archived ones."""
        if principal.run_id is None:
            runs = [run for run in await self._runs.list_() if covers(principal, run)]
        else:
            runs = [await self.run(principal.run_id)]
        return [run for run in runs if not run.is_archived]

    def names_of(self, run: RunView) -> list[str]:
        """Return the names under which the run is listed; `served` takes them all."""
        version = self._swaps.serving(run.id)
        if version is None:
            return [run.name]
        names = [run.name, f"{run.name}@latest", f"{run.name}@{version}"]
        is_base = version == 0 and run.begun_from is None
        return [*names, run.settings.model] if is_base and run.settings.model else names

    async def _called(self, name: str) -> RunView | None:
        """Find a run by its name."""
        run_id = self._ids.get(name)
        if run_id is not None:
            try:
                return await self.run(run_id)
            except NotFound:  # deleted; another run may have the name now
                del self._ids[name]
        try:
            run = await self._runs.by_name(name)
        except ModelNotFound:
            return None
        # Bounded by the number of runs: only names that exist are remembered.
        self._ids[name] = run.id
        return run

    async def _read(self, run_id: str) -> RunView:
        async with self._reading:  # many calls find a row too old at the same time: one of them reads it
            run = self._fresh(run_id)
            if run is None:
                now = self._clock()  # before the read: the row is at least as new as this
                try:
                    run = await self._runs.by_id(run_id)
                except StoreUnavailable:
                    if not self._outlives_store or run_id not in self._rows:
                        raise
                    run = self._rows[run_id][1]
                self._rows[run_id] = (now, run)
        return run

    def _fresh(self, run_id: str) -> RunView | None:
        known = self._rows.get(run_id)
        if known is None or not known[0] <= self._clock() < known[0] + _FRESH_SECONDS:
            return None
        return known[1]


def _named_version(run: RunView, name: str) -> int | None:
    """Return the version that a name such as `shop@12` of the run `shop` names; None for any other name."""
    digits = name.removeprefix(f"{run.name}@")
    is_version = digits != name and digits.isascii() and digits.isdecimal() and len(digits) <= _VERSION_DIGITS
    return int(digits) if is_version else None


class _Named(msgspec.Struct):
    """The only field of a body that must be known before the model's own reader can read it."""

    model: str


def _named_model(body: bytes) -> str:
    """Return the `model` of a call's body. Raise InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"with the key of a project, a JSON body must name the run as `model`: {error}", param="model"
        ) from error


def _check_name(run: RunView, name: str, version: int) -> None:
    """Raise ModelNotFound unless `name` means this run at this version."""
    if name in (run.name, f"{run.name}@latest", f"{run.name}@{version}"):
        return
    if name in (run.base_model, run.settings.model, Path(run.base_model).name):
        # The base model's own name is version 0. A trained version under this name would mislead evaluations.
        if run.begun_from is not None:
            raise ModelNotFound(
                f"{name!r} is no version of the run {run.name!r}, which began from {run.begun_from}: ask for"
                f" {run.name!r}",
                param="model",
            )
        if version == 0:
            return
        raise ModelNotFound(
            f"{name!r} is version 0 of the run {run.name!r}, which serves version {version}: ask for {run.name!r}",
            param="model",
        )
    raise ModelNotFound(
        f"there is no model {name!r} for this key: ask for its run, {run.name!r} or '{run.name}@{version}'",
        param="model",
    )
