"""The runs of a store, read without a proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from proxy.database import migrate
from proxy.errors import StoreUnavailable
from proxy.runs.repository import RunRepository
from proxy.settings import ConfigurationError, RunSettings, Settings


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    name: str
    base_model: str


def stored_runs(settings: Settings) -> tuple[StoredRun, ...]:
    """Return the runs of the store, oldest first; none for a store that is absent or unreadable, which the proxy
    reports when it opens it."""
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        return ()
    try:
        with migrate.opened(settings.database_url) as connection:
            rows = RunRepository(connection).all_by_age()
    except (SQLAlchemyError, StoreUnavailable, ConfigurationError):
        return ()
    return tuple(StoredRun(name=row.name, base_model=row.base_model) for row in rows)


def chosen_run(settings: Settings, stored: tuple[StoredRun, ...], *, named: bool) -> RunSettings:
    """Return the settings of the run to continue. Unless it is `named`, it is the store's only run, and its base
    model need not be given either.

    A data directory with runs gets no further run, unless the configuration has tables of runs: its keys belong to
    those, and the likely cause of a new name is a forgotten or misspelt option. Raises ConfigurationError.
    """
    run = settings.run
    names = [each.name for each in stored]
    if not named and len(stored) > 1 and run.name not in names:
        raise ConfigurationError(f"the store has several runs: {', '.join(names)}; say which with --run")
    if not named and len(stored) == 1:
        run = run.model_copy(update={"name": stored[0].name})
    if stored and run.name not in names and settings.database.url is None and not settings.runs:
        has = f"the run {names[0]!r}" if len(names) == 1 else f"the runs {', '.join(names)}"
        go_on = "leave --run out" if len(names) == 1 else "name one of them with --run"
        raise ConfigurationError(
            f"{settings.server.data_dir} has {has}, and none called {run.name!r}: {go_on} to go on, or begin another"
            " run in a place of its own with --data-dir"
        )
    known = next((each for each in stored if each.name == run.name), None)
    if known is not None and not run.model:
        run = run.model_copy(update={"model": known.base_model})
    return run
