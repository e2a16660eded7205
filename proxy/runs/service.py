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
from proxy.contract.policy import WeightsReference
from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import DEFAULT_PROJECT_ID
from proxy.database.unit_of_work import Database
from proxy.errors import BaseRlError, Conflict, ModelNotFound, NotFound, RunArchived, StoreUnavailable
from proxy.lifecycle.events import append_event
from proxy.projects.service import ensure_project
from proxy.runs.beginnings import Beginnings, CheckWeights, begun_from, find_beginning, refuse_other_weights
from proxy.runs.repository import RunRepository
from proxy.settings import DEFAULT_PROJECT, ConfigurationError, RunSettings, UsageLimits


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. `base_model` is a Hugging Face id or an absolute directory; `project` is a name."""

    id: RunId
    name: str
    state: str
    base_model: str
    settings: RunSettings
    head_version: int
    serving_version: int
    created_at: float
    begun_from: str | None = None
    """The version of another run whose weights are version 0, such as `shop@12`; None for a run that began from its
    base model."""
    project_id: str = DEFAULT_PROJECT_ID
    project: str = DEFAULT_PROJECT
    project_limits: UsageLimits | None = None
    """The limits of all runs of the project together."""

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

    def __init__(self, database: Database, clock: Clock, check_weights: CheckWeights | None = None) -> None:
        """`check_weights` checks the version from which a declared run begins; without it, its files are trusted."""
        self._database = database
        self._clock = clock
        self._beginnings = Beginnings(database, check_weights or _trusted)
        # Validating the settings costs far more than reading the row, which is read every time as its versions
        # change. Bounded by the number of runs.
        self._parsed: dict[str, tuple[dict[str, Any], RunSettings]] = {}
        self._parsed_limits: dict[str, tuple[dict[str, Any], UsageLimits]] = {}

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
        row = await self._database.read(lambda connection: RunRepository(connection).by_name(settings.name))
        if row is None and settings.begin_from is not None:
            await self._checked_beginning(settings, base_model)
        # An unchanged run was checked before, and a start with hundreds of runs must not load each model.
        if check is not None and (row is None or row.config != settings.stored):
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

    async def withdraw(self, run_id: RunId) -> None:
        """Remove a run that a start has just created by mistake. `RunDeletion` deletes any other run."""
        await self._database.commit(lambda connection: RunRepository(connection).delete(run_id))
        self._parsed.pop(run_id, None)

    async def _checked_beginning(self, settings: RunSettings, base_model: str) -> None:
        """Check the version from which a new declared run begins. Raise ConfigurationError."""
        try:
            beginning = await self._beginnings.find(str(settings.begin_from))
            refuse_other_weights(beginning, base_model=base_model, weights=settings.weights)
        except StoreUnavailable:
            raise
        except BaseRlError as error:
            raise ConfigurationError(f"the run {settings.name!r}: {error.message}") from error

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
            begun_from=begun_from(row),
            project_id=row.project_id,
            project=row.project,
            project_limits=self._project_limits(row.project_id, row.project_settings.get("limits")),
        )

    def _project_limits(self, project_id: str, limits: dict[str, Any] | None) -> UsageLimits | None:
        if limits is None:
            return None
        known = self._parsed_limits.get(project_id)
        if known is None or known[0] != limits:
            self._parsed_limits[project_id] = known = (limits, UsageLimits.model_validate(limits))
        return known[1]

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
    config = settings.stored
    row = repository.by_name(settings.name)
    if row is None:
        _check_named(settings, repository)
        project_id = ensure_project(connection, settings.project or DEFAULT_PROJECT, now)
        insert_run(connection, settings, base_model, now, project_id=project_id, begin_from=settings.begin_from)
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
    else:
        if row.config != config:
            configure_run(connection, row, config, now)
        if settings.project is not None:
            move_run(connection, row.id, ensure_project(connection, settings.project, now), now)


def insert_run(
    connection: Connection,
    settings: RunSettings,
    base_model: str,
    now: float,
    *,
    project_id: str,
    begin_from: str | None = None,
    **origin: str,
) -> RunId:
    """Insert a run with its version 0, and return its id. `begin_from` names the version of another run that
    version 0 has the weights of. `origin` is recorded in the event.

    Raise Conflict if there is a run of this name, InvalidRequest if no run can begin from that version.
    """
    run_id = new_run_id()
    # Found again in this transaction: the version may have been removed since its files were checked.
    beginning = find_beginning(connection, begin_from, lock=True) if begin_from is not None else None
    if beginning is not None:
        refuse_other_weights(beginning, base_model=base_model, weights=settings.weights)
    RunRepository(connection).insert(
        run_id=run_id,
        name=settings.name,
        base_model=base_model,
        project_id=project_id,
        config=settings.stored,
        reward_rules=msgspec.to_builtins(settings.reward_rules),
        now=now,
        begun_from=None if beginning is None else (beginning.run_id, beginning.version),
        weights=None if beginning is None else beginning.columns,
    )
    data = {"name": settings.name, "base_model": base_model, **origin}
    if beginning is not None:
        data["begun_from"] = beginning.name
    append_event(connection, run_id=run_id, kind="run.created", data=data, now=now)
    return run_id


async def _trusted(weights: WeightsReference, base_model: str) -> None:
    """Accept weights without a check."""


def configure_run(connection: Connection, row: AnyRow, config: dict[str, Any], now: float) -> None:
    """Give the run of this row other settings."""
    RunRepository(connection).set_config(row.id, config)
    data = {"changed": sorted(key for key in config if row.config.get(key) != config[key])}
    append_event(connection, run_id=row.id, kind="run.configured", data=data, now=now)


def move_run(connection: Connection, run_id: str, project_id: str, now: float) -> None:
    """Move a run to a project; do nothing if it is there. Raise NotFound if the run was deleted meanwhile."""
    repository = RunRepository(connection)
    row = repository.by_id(run_id, lock=True)
    if row is None:
        raise NotFound(f"there is no run {run_id!r}: it was deleted meanwhile")
    if row.project_id == project_id:
        return
    repository.set_project(run_id, project_id)
    moved = repository.by_id(run_id)
    assert moved is not None
    data = {"from": row.project, "to": moved.project}
    append_event(connection, run_id=run_id, kind="run.moved", data=data, now=now)


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
