"""The directory of runs: creation, look-up, settings, deletion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId, new_run_id
from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, ModelNotFound, NotFound, RunArchived
from proxy.lifecycle.events import append_event
from proxy.runs.repository import RunRepository
from proxy.settings import ConfigurationError, RunSettings


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. `base_model` is a Hugging Face id or an absolute directory."""

    id: RunId
    name: str
    state: str
    base_model: str
    settings: RunSettings
    head_version: int
    serving_version: int
    created_at: float

    @property
    def is_archived(self) -> bool:
        return self.state == RunState.ARCHIVED

    def refuse_archived(self) -> None:
        """Raise RunArchived if the run is archived."""
        if self.is_archived:
            raise RunArchived(self.name)


CheckModel = Callable[[str, RunSettings], Awaitable[None]]
"""Load what calls of a run need: base model in the first argument, settings in the second. Raises ConfigurationError
for a model without a usable tokenizer or template, and for settings that do not fit the model."""


class RunDirectory:
    """Creates, finds and deletes runs."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        # Validating the settings costs far more than reading the row, which is read every time as its versions
        # change. Bounded by the number of runs.
        self._parsed: dict[str, tuple[dict[str, Any], RunSettings]] = {}

    async def ensure(self, settings: RunSettings, *, check: CheckModel | None = None) -> RunView:
        """Return the run that `settings` name; create it with version 0 if it is new, update it if they changed.

        `check` is applied to a new run, and to one whose settings changed. Raise ConfigurationError if it does, if no
        base model is given, if the run exists with another base model or kind of weights, or if a new run would take
        the default name in a store that has runs: that is nearly always a forgotten `run.name`.
        """
        if not settings.model:
            raise ConfigurationError(
                "run.model: no base model is given; set it to a directory or a Hugging Face id "
                "(in the file, as BASE_RL_RUN__MODEL, or with --model)"
            )
        base_model = resolved_model(settings.model)
        if check is not None:
            row = await self._database.read(lambda connection: RunRepository(connection).by_name(settings.name))
            # An unchanged run was checked before, and a start with hundreds of runs must not load each model.
            if row is None or row.config != settings.model_dump(mode="json"):
                await _checked(check, base_model, settings)
        write = partial(_create_or_configure, settings, base_model, self._clock())
        try:
            await self._database.commit(write)
        except Conflict:
            # Another proxy with this configuration has created the run meanwhile: now it is found.
            await self._database.commit(write)
        return await self.by_name(settings.name)

    async def by_name(self, name: str) -> RunView:
        """Return the run that agents name as `model`. Raise ModelNotFound."""
        row = await self._database.read(lambda connection: RunRepository(connection).by_name(name))
        if row is None:
            raise ModelNotFound(f"there is no run called {name!r}", param="model")
        return self._view(row)

    async def by_id(self, run_id: str) -> RunView:
        """Return a run by its id. Raise NotFound."""
        row = await self._database.read(lambda connection: RunRepository(connection).by_id(run_id))
        if row is None:
            raise NotFound(f"there is no run {run_id!r}")
        return self._view(row)

    async def by_name_or_id(self, name_or_id: str) -> RunView:
        """Return the run that a path's `{run}` names. Raise NotFound."""
        row = await self._database.read(lambda connection: RunRepository(connection).by_name_or_id(name_or_id))
        if row is None:
            raise NotFound(f"there is no run {name_or_id!r}")
        return self._view(row)

    async def delete(self, name_or_id: str, *, is_served: bool) -> None:
        """Delete a run that was created by mistake. `is_served`: an engine is there for it.

        Raise NotFound if there is no such run, Conflict if it is served or has sessions, claims or steps.
        """
        run = await self.by_name_or_id(name_or_id)
        if is_served:
            raise Conflict(f"an engine serves the run {run.name!r}: free it by `base-rl runs archive {run.name}`")

        def delete(connection: Connection) -> None:
            # Checked in the transaction that deletes, so that no session can begin in between.
            repository = RunRepository(connection)
            if repository.has_leased_claims(run.id, self._clock()):
                raise Conflict(
                    f"a trainer works on trajectories of the run {run.name!r}: stop it, and archive the run with"
                    f" `base-rl runs archive {run.name}`"
                )
            if repository.has_history(run.id):
                raise Conflict(
                    f"the run {run.name!r} has sessions, claims or steps; only a run without any recorded data can be"
                    f" deleted: archive this one with `base-rl runs archive {run.name}`; it then serves nothing"
                )
            repository.delete(run.id)
            data = {"name": run.name, "base_model": run.base_model}
            append_event(connection, run_id=None, kind="run.deleted", data=data, now=self._clock())

        await self._database.commit(delete)
        self._parsed.pop(run.id, None)

    async def list_(self) -> list[RunView]:
        """Return all runs, oldest first."""
        rows = await self._database.read(lambda connection: RunRepository(connection).all_by_age())
        return [self._view(row) for row in rows]

    def _view(self, row: AnyRow) -> RunView:
        return RunView(
            id=RunId(row.id),
            name=row.name,
            state=row.state,
            base_model=row.base_model,
            settings=self._settings(row.id, row.config),
            head_version=row.head_version,
            serving_version=row.serving_version,
            created_at=row.created_at,
        )

    def _settings(self, run_id: str, config: dict[str, Any]) -> RunSettings:
        known = self._parsed.get(run_id)
        if known is None or known[0] != config:
            known = (config, RunSettings.model_validate(config))
            self._parsed[run_id] = known
        return known[1]


async def _checked(check: CheckModel, base_model: str, settings: RunSettings) -> None:
    try:
        await check(base_model, settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"the run {settings.name!r}: {error}") from error


def _create_or_configure(settings: RunSettings, base_model: str, now: float, connection: Connection) -> None:
    repository = RunRepository(connection)
    config = settings.model_dump(mode="json")
    row = repository.by_name(settings.name)
    if row is None:
        _check_named(settings, repository)
        insert_run(connection, settings, base_model, now)
    elif row.base_model != base_model:
        raise ConfigurationError(
            f"run.model: the run {settings.name!r} was created on {row.base_model} and cannot continue on "
            f"{base_model}; set the original model again, choose another run.name, or another server.data_dir"
        )
    elif row.config.get("weights", "full") != settings.weights:
        raise ConfigurationError(
            f"run.weights: the run {settings.name!r} was created with another kind of weights than"
            f" {settings.weights!r}, and keeps it; set that kind again, or choose another run.name"
        )
    elif row.config != config:
        configure_run(connection, row, config, now)


def insert_run(connection: Connection, settings: RunSettings, base_model: str, now: float, **origin: str) -> RunId:
    """Insert a run with its version 0, and return its id. `origin` is recorded in the event. Raise Conflict if there
    is a run of this name."""
    run_id = new_run_id()
    RunRepository(connection).insert(
        run_id=run_id,
        name=settings.name,
        base_model=base_model,
        config=settings.model_dump(mode="json"),
        reward_rules=msgspec.to_builtins(settings.reward_rules),
        now=now,
    )
    data = {"name": settings.name, "base_model": base_model, **origin}
    append_event(connection, run_id=run_id, kind="run.created", data=data, now=now)
    return run_id


def configure_run(connection: Connection, row: AnyRow, config: dict[str, Any], now: float) -> None:
    """Give the run of this row other settings."""
    RunRepository(connection).set_config(row.id, config)
    data = {"changed": sorted(key for key in config if row.config.get(key) != config[key])}
    append_event(connection, run_id=row.id, kind="run.configured", data=data, now=now)


def _check_named(settings: RunSettings, repository: RunRepository) -> None:
    """Raise ConfigurationError if a new run would take the default name beside other runs."""
    others = [] if "name" in settings.model_fields_set else repository.all_by_age()
    if others:
        raise ConfigurationError(
            f"run.name: not set, and the store has no run {settings.name!r}; it has"
            f" {', '.join(other.name for other in others)}. Set it to one of them, or to the name of a new run"
        )


def resolved_model(model: str) -> str:
    """Return a directory's absolute path; return a Hugging Face id unchanged."""
    # The proxy and the trainer may start in different directories and must mean the same model.
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model
