"""Create, change, archive and delete projects. Each operation is one transaction with its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import new_project_id
from proxy.database.rows import AnyRow
from proxy.database.tables import DEFAULT_PROJECT_ID
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.projects.repository import ProjectRepository
from proxy.settings import UsageLimits

T = TypeVar("T")


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project. `runs` counts its runs, archived ones included; `limits` are those of all its runs together."""

    id: str
    name: str
    created_at: float
    archived_at: float | None
    runs: int
    limits: dict[str, Any] | None


class ProjectDirectory:
    """Finds and changes projects. A project is named by its name or its id. Every method raises NotFound for one that
    does not exist."""

    def __init__(self, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def list_(self) -> list[ProjectView]:
        """Return all projects, oldest first."""

        def read(connection: Connection) -> list[ProjectView]:
            repository = ProjectRepository(connection)
            runs = repository.runs_by_project()
            return [_view(row, runs.get(row.id, 0)) for row in repository.all_by_age()]

        return await self._database.read(read)

    async def get(self, name_or_id: str) -> ProjectView:
        """Return a project."""
        return await self._database.read(lambda connection: _read(connection, name_or_id))

    async def create(self, name: str) -> ProjectView:
        """Create a project. Raise Conflict if the name is taken."""
        now = self._clock()

        def write(connection: Connection) -> ProjectView:
            project_id = _insert(connection, name, now)
            return _read(connection, project_id)

        return await self._changed(write)

    async def archive(self, name_or_id: str, *, archived: bool) -> ProjectView:
        """Archive or unarchive a project; do nothing if it is in that state. An archived project takes no runs.

        Raise Conflict if it has runs that are not archived, InvalidRequest for the default project.
        """
        now = self._clock()

        def write(connection: Connection) -> ProjectView:
            row = require_project(connection, name_or_id, lock=True)
            if archived != (row.archived_at is not None):
                _archive(connection, row, archived=archived, now=now)
            return _read(connection, row.id)

        return await self._changed(write)

    async def limit(self, name_or_id: str, limits: UsageLimits) -> ProjectView:
        """Replace the limits of all runs of the project together; without any limit, there are none."""
        now = self._clock()

        def write(connection: Connection) -> ProjectView:
            row = require_project(connection, name_or_id, lock=True)
            others = {name: value for name, value in row.settings.items() if name != "limits"}
            settings = others if limits.stored is None else {**others, "limits": limits.stored}
            if settings != row.settings:
                ProjectRepository(connection).set(row.id, {"settings": settings})
                data = {"name": row.name, "changed": ["limits"]}
                append_event(connection, run_id=None, kind="project.configured", data=data, now=now)
            return _read(connection, row.id)

        return await self._changed(write)

    async def delete(self, name_or_id: str) -> None:
        """Delete a project and its keys. Raise Conflict if it has runs or is the default project."""
        now = self._clock()

        def write(connection: Connection) -> None:
            row = require_project(connection, name_or_id, lock=True)
            if row.id == DEFAULT_PROJECT_ID:
                raise Conflict(f"the project {row.name!r} takes runs for which no project is given: it always exists")
            runs = ProjectRepository(connection).run_names(row.id)
            if runs:
                raise Conflict(
                    f"the project {row.name!r} has {len(runs)} runs, such as {runs[0]!r}: move them to another one"
                    " (PATCH /api/v1/runs/{run} with `project`) or delete them first, or archive the project"
                )
            ProjectRepository(connection).delete(row.id)
            append_event(connection, run_id=None, kind="project.deleted", data={"name": row.name}, now=now)

        await self._changed(write)

    async def _changed(self, write: Callable[[Connection], T]) -> T:
        result = await self._database.commit(write)
        self._signals.events.notify()
        return result


def require_project(connection: Connection, name_or_id: str, *, lock: bool = False) -> AnyRow:
    """Return the row of a project. Raise NotFound."""
    row = ProjectRepository(connection).by_name_or_id(name_or_id, lock=lock)
    if row is None:
        raise NotFound(f"there is no project {name_or_id!r}", param="project")
    return row


def require_open_project(connection: Connection, name_or_id: str) -> AnyRow:
    """Return the row of a project that takes runs and keys. Raise NotFound, or Conflict if it is archived."""
    # Locked, so that the project is neither archived nor deleted before the run is in it.
    row = require_project(connection, name_or_id, lock=True)
    if row.archived_at is not None:
        raise Conflict(f"the project {row.name!r} is archived: unarchive it first, or name another", param="project")
    return row


def ensure_project(connection: Connection, name: str, now: float) -> str:
    """Return the id of the project of this name; create it if there is none."""
    row = ProjectRepository(connection).by_name(name)
    return _insert(connection, name, now) if row is None else str(row.id)


def _insert(connection: Connection, name: str, now: float) -> str:
    project_id = new_project_id()
    ProjectRepository(connection).insert(project_id=project_id, name=name, settings={}, now=now)
    append_event(connection, run_id=None, kind="project.created", data={"name": name}, now=now)
    return project_id


def _archive(connection: Connection, row: AnyRow, *, archived: bool, now: float) -> None:
    if archived and row.id == DEFAULT_PROJECT_ID:
        raise InvalidRequest(f"the project {row.name!r} always exists: it cannot be archived", param="archived")
    active = ProjectRepository(connection).run_names(row.id, but_archived=True) if archived else []
    if active:
        raise Conflict(
            f"the project {row.name!r} has runs that are not archived, such as {active[0]!r}: archive them first"
            f" (`base-rl runs archive {active[0]}`)"
        )
    ProjectRepository(connection).set(row.id, {"archived_at": now if archived else None})
    kind = "project.archived" if archived else "project.unarchived"
    append_event(connection, run_id=None, kind=kind, data={"name": row.name}, now=now)


def _read(connection: Connection, name_or_id: str) -> ProjectView:
    row = require_project(connection, name_or_id)
    return _view(row, len(ProjectRepository(connection).run_names(row.id)))


def _view(row: AnyRow, runs: int) -> ProjectView:
    return ProjectView(
        id=row.id,
        name=row.name,
        created_at=row.created_at,
        archived_at=row.archived_at,
        runs=runs,
        limits=row.settings.get("limits"),
    )
