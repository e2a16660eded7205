"""Steps of a start that may be refused: the data directory, the store, the run and its bootstrap keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from proxy.auth.access import PrincipalKind
from proxy.auth.secret import load_secret
from proxy.auth.service import Credentials
from proxy.database import migrate
from proxy.database.unit_of_work import Database
from proxy.log import logger
from proxy.private_files import make_directory, tighten
from proxy.runs.service import CheckModel, RunDirectory, RunView
from proxy.settings import ConfigurationError, Settings

# Longest time that a start waits for the check for damage: enough for a store of about a gigabyte.
_CHECK_SECONDS = 5.0

_LOG = logger(__name__)


def prepare_data_dir(settings: Settings) -> bytes:
    """Make the data directory, private to its owner, and return the secret in it. Raises ConfigurationError."""
    with _data_dir_in_use(settings):
        _keep_private(settings)
        return load_secret(settings.server.data_dir)


@contextmanager
def _data_dir_in_use(settings: Settings) -> Iterator[None]:
    """Raise ConfigurationError, with what to do, where the system refuses the data directory."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {settings.server.data_dir} cannot be used ({error.strerror or error}): give base-rl "
            "the right to write there, or name another with server.data_dir or --data-dir"
        ) from error


def _keep_private(settings: Settings) -> None:
    """Make the data directory, or close one that an earlier version left open to other users."""
    make_directory(settings.server.data_dir)
    store = make_url(settings.database_url)
    changed = tighten(
        settings.server.data_dir,
        store=Path(str(store.database)) if store.get_backend_name() == "sqlite" else None,
        directory=not settings.server.shared_data_dir,
    )
    if changed:
        _LOG.warning("other users could read these; now only their owner can", paths=[str(path) for path in changed])


async def open_database(settings: Settings) -> Database:
    """Return the store, migrated and checked. Raises ConfigurationError, StoreDamaged, StoreUnavailable."""
    database = Database(
        settings.database_url,
        synchronous=settings.database.synchronous,
        busy_timeout_seconds=settings.database.busy_timeout_seconds,
        connect_timeout_seconds=settings.database.connect_timeout_seconds,
        statement_timeout_seconds=settings.database.statement_timeout_seconds,
        connections=settings.database.connections,
    )
    try:
        # In a thread: migrations are synchronous, and may wait for those of another process.
        await asyncio.to_thread(migrate.upgrade, settings.database_url)
        await database.check_integrity(patience_seconds=_CHECK_SECONDS)
    except BaseException:
        await database.aclose()
        raise
    return database


async def begin_run(settings: Settings, runs: RunDirectory, credentials: Credentials, check: CheckModel) -> RunView:
    """Return the first run, with its bootstrap keys registered; `check` loads the model of a new or changed run.

    Raises ConfigurationError. A new run whose keys belong to another run was named by mistake: it is deleted again,
    so that the mistake leaves nothing behind.
    """
    known = {each.name for each in await runs.list_()}
    run = await runs.ensure(settings.run, check=check)
    try:
        await _register_bootstrap_keys(settings, credentials, run)
    except ConfigurationError as error:
        if run.name in known:
            raise
        await runs.withdraw(run.id)
        has = (
            f" (run.name: there is no run {run.name!r} yet; the store has {', '.join(sorted(known))})"
            if known
            else ""
        )
        raise ConfigurationError(f"{error}{has}") from error
    return run


async def begin_other_runs(settings: Settings, runs: RunDirectory, check: CheckModel) -> None:
    """Create or update every declared run but the first; `check` loads the model of a new one, or of one whose
    settings changed. Raise ConfigurationError, after which a repeated start goes on where this one ended."""
    for run in settings.declared_runs[1:]:
        await runs.ensure(run, check=check)


async def _register_bootstrap_keys(settings: Settings, credentials: Credentials, run: RunView) -> None:
    """Register the keys of the configuration: the run key for the first run, the trainer key for every run if several
    are declared."""
    keys = settings.bootstrap
    for kind, text, run_id in (
        (PrincipalKind.ADMIN, keys.admin_key, None),
        (PrincipalKind.RUN, keys.run_key, run.id),
        (PrincipalKind.TRAINER, keys.trainer_key, None if settings.runs else run.id),
    ):
        if text is not None:
            await credentials.register(kind, text.get_secret_value(), run_id=run_id)
