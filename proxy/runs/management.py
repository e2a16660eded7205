"""Runs as a resource: create, change and clone them while the proxy runs.

A run is validated before it is written, as its calls would be: by loading the tokenizer and the chat template of its
base model. Each operation is one transaction, so a process that dies leaves nothing half made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.configuration import merge, without_none
from proxy.contract.identifiers import RunId
from proxy.database.rows import AnyRow
from proxy.database.tables import DEFAULT_PROJECT_ID
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound, StoreContended
from proxy.http.body import invalid
from proxy.lifecycle.signals import Signals
from proxy.projects.service import require_open_project
from proxy.runs.beginnings import Beginnings, CheckWeights, refuse_other_weights
from proxy.runs.repository import RunRepository
from proxy.runs.service import CheckModel, RunDirectory, RunView, configure_run, insert_run, move_run, resolved_model
from proxy.settings import ConfigurationError, RunSettings

# A change is computed anew if somebody else changed the run meanwhile. Each attempt loses only to another change that
# succeeded, so a few are enough for people and scripts.
_ATTEMPTS = 5

# Keys of a run that are given beside its settings.
_BESIDE = ("name", "model", "from", "project")


class RunManagement:
    """Creates, changes and clones runs. Methods raise InvalidRequest for settings that are wrong or do not fit the
    model, Conflict for a name that is taken, and NotFound for a run that does not exist."""

    def __init__(
        self,
        *,
        database: Database,
        runs: RunDirectory,
        signals: Signals,
        clock: Clock,
        check: CheckModel,
        apply_rules: Callable[[], Awaitable[None]],
        check_weights: CheckWeights,
    ) -> None:
        """`apply_rules` recombines the rewards of runs whose reward rules have changed. `check_weights` checks the
        files of a version from which a run begins."""
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._check = check
        self._apply_rules = apply_rules
        self._beginnings = Beginnings(database, check_weights)

    async def create(
        self,
        name: str,
        model: str | None,
        settings: Mapping[str, Any],
        *,
        begin_from: str | None = None,
        project: str = DEFAULT_PROJECT_ID,
    ) -> RunView:
        """Create a run on a base model in a project (a name or an id). Settings that are not given have their
        defaults.

        With `begin_from`, which names a version of another run, version 0 has the weights of that version; `model`
        and the setting `weights` are that run's and need not be given. Raise NotFound for an unknown project,
        Conflict for an archived one.
        """
        if begin_from is None:
            if model is None:
                raise InvalidRequest("model: give a base model, or a version to begin `from`", param="model")
            checked = _validated(name, model, settings)
            return await self._insert(checked, await self._checked(checked, _model_at(model)), project)
        beginning = await self._beginnings.find(begin_from)
        base_model = beginning.base_model if model is None else _model_at(model)
        checked = _validated(name, base_model, {"weights": beginning.weights_kind, **settings})
        refuse_other_weights(beginning, base_model=base_model, weights=checked.weights)
        await self._checked(checked, base_model)
        return await self._insert(checked, base_model, project, begin_from=begin_from)

    async def clone(self, name_or_id: str, name: str, patch: Mapping[str, Any]) -> RunView:
        """Create a run with another run's base model and settings, with `patch` merged into them."""
        source = await self._runs.by_name_or_id(name_or_id)
        config = source.settings.stored
        checked = _validated(name, config["model"], _merged(_without_beside(config), patch))
        await self._checked(checked, source.base_model)
        return await self._insert(checked, source.base_model, source.project_id, cloned_from=source.name)

    async def change(self, name_or_id: str, patch: Mapping[str, Any]) -> RunView:
        """Merge `patch` into the run's settings: a value of None sets a key to its default, a table is merged key by
        key, and anything else replaces the value. Calls see the change within a second or two."""
        for _ in range(_ATTEMPTS):
            run = await self._runs.by_name_or_id(name_or_id)
            config = run.settings.stored
            changed = _validated(run.name, config["model"], _merged(_without_beside(config), patch))
            if changed.weights != run.settings.weights:
                raise InvalidRequest(
                    f"a run keeps its kind of weights, which is {run.settings.weights!r}: begin a new run instead",
                    param="settings.weights",
                )
            await self._checked(changed, run.base_model)
            write = partial(_configure, run.id, run.settings, changed, self._clock())
            if await self._database.commit(write):
                return await self._changed(run.id)
        raise StoreContended(f"others change the settings of the run {run.name!r} too: read them and try again")

    async def move(self, name_or_id: str, project: str) -> RunView:
        """Move a run to another project. Its keys move with it. Raise NotFound, or Conflict for an archived
        project."""
        run = await self._runs.by_name_or_id(name_or_id)
        now = self._clock()
        await self._database.commit(
            lambda connection: move_run(connection, run.id, require_open_project(connection, project).id, now)
        )
        return await self._changed(run.id)

    async def _insert(
        self, settings: RunSettings, base_model: str, project: str, *, begin_from: str | None = None, **origin: str
    ) -> RunView:
        now = self._clock()

        def insert(connection: Connection) -> RunId:
            project_id = require_open_project(connection, project).id
            return insert_run(
                connection, settings, base_model, now, project_id=project_id, begin_from=begin_from, **origin
            )

        run_id = await self._database.commit(insert)
        return await self._changed(run_id)

    async def _changed(self, run_id: RunId) -> RunView:
        self._signals.events.notify()
        await self._apply_rules()
        return await self._runs.by_id(run_id)

    async def _checked(self, settings: RunSettings, base_model: str) -> str:
        """Return the base model after loading what calls of the run need."""
        try:
            await self._check(base_model, settings)
        except ConfigurationError as error:
            raise InvalidRequest(str(error), param="model") from error
        return base_model


def _validated(name: str, model: str, settings: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run. Raise InvalidRequest that names the wrong key."""
    for key in _BESIDE:
        if key in settings:
            path = f"settings.{key}"
            raise InvalidRequest(f"{path}: it is no setting; give {key!r} beside `settings`", param=path)
    try:
        return RunSettings.model_validate({**settings, "name": name, "model": model})
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        beside = [detail for detail in details if detail["loc"][:1] and detail["loc"][0] in _BESIDE]
        raise invalid(beside) if beside else invalid(details, "settings") from error


def _model_at(model: str) -> str:
    try:
        return resolved_model(model)
    except (OSError, RuntimeError, ValueError) as error:  # such as a home directory of nobody
        raise InvalidRequest(f"model: {error}", param="model") from error


def _without_beside(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _BESIDE}


def _merged(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings after a JSON merge patch (RFC 7396)."""
    return without_none(merge(config, patch), patch)


def _configure(run_id: RunId, before: RunSettings, after: RunSettings, now: float, connection: Connection) -> bool:
    """Store the settings. Return False, with nothing changed, if they are not those of `before` any more."""
    row: AnyRow | None = RunRepository(connection).by_id(run_id, lock=True)
    if row is None:
        raise NotFound(f"there is no run {run_id!r}: it was deleted meanwhile")
    if RunSettings.model_validate(row.config) != before:
        return False
    if after != before:
        configure_run(connection, row, after.stored, now)
    return True
