"""Delete runs with everything that belongs to them.

One transaction marks the run as deleted, frees its name, deletes its keys and appends `run.deleted`, with the amount
of data, to the event log. From that commit on the run is gone for everybody and the deletion cannot be undone. Its
rows are removed afterwards in small transactions, then its weights, then the marked row itself. A process that dies
in between leaves the marked row, and the next start goes on (`finish_all`).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import BaseRlError, Conflict, InvalidRequest, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.runs.deletion_repository import DeletionRepository, described, find_hidden
from proxy.runs.repository import RunRepository

# How long a request waits until everything is removed. The rest goes on without it.
_PATIENCE_SECONDS = 10.0
# From this many turns on, the indexes that deletions use pay for themselves.
_INDEXED_FROM = 500

_LOG = logger(__name__)


class RunDeletion:
    """Deletes runs. `weights_dir` is the directory below which trainers publish, `memory_dir` the one in shared
    memory; `remove_stored` removes a run's versions from an object store."""

    def __init__(
        self,
        *,
        database: Database,
        signals: Signals,
        clock: Clock,
        weights_dir: Path,
        memory_dir: Path | None = None,
        remove_stored: Callable[[str], None] | None = None,
    ) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._weights_dir = weights_dir
        self._memory_dir = memory_dir
        self._remove_stored = remove_stored
        # One run at a time in this process: two would only compete for the database.
        self._lock = asyncio.Lock()
        self._removing: set[asyncio.Task[None]] = set()

    async def delete(self, name_or_id: str, *, confirm: str | None, is_served: bool) -> bool:
        """Delete a run. Return whether all its rows and weights are removed already; if not, they will be.

        A run with sessions, claims or steps must be archived, and `confirm` must be its name. `is_served`: an engine
        is there for it. Raise NotFound if there is no such run, InvalidRequest without the confirmation, and Conflict
        if the run is served, trained, or begun from by other runs.
        """
        run_id = await self._database.commit(
            partial(_hide, name_or_id=name_or_id, confirm=confirm, is_served=is_served, now=self._clock())
        )
        self._signals.events.notify()
        task = asyncio.create_task(self._finish(run_id), name=f"delete {run_id}")
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)
        await asyncio.wait({task}, timeout=_PATIENCE_SECONDS)
        return task.done() and run_id not in await self._database.read(find_hidden)

    async def finish_all(self) -> None:
        """Remove what is left of deleted runs, also of those that another process began to delete."""
        for run_id in await self._database.read(find_hidden):
            await self._finish(RunId(run_id))

    async def aclose(self) -> None:
        """Stop removing. The next start goes on."""
        for task in self._removing:
            task.cancel()
        await asyncio.gather(*self._removing, return_exceptions=True)

    async def _finish(self, run_id: RunId) -> None:
        """Remove the rows and weights of a marked run. A failure is logged, and the next round tries again."""
        async with self._lock:
            try:
                await self._remove(run_id)
            except (OSError, BaseRlError) as error:
                _LOG.warning("a deleted run is not removed yet", run=run_id, error=str(error))
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("a deleted run is not removed yet", run=run_id)

    async def _remove(self, run_id: RunId) -> None:
        amount = await self._database.read(lambda connection: DeletionRepository(connection).amount(run_id))
        if amount.turns >= _INDEXED_FROM:
            await self._database.commit(lambda connection: DeletionRepository(connection).add_indexes())
        while sessions := await self._database.commit(
            lambda connection: DeletionRepository(connection).delete_sessions(run_id)
        ):
            self._signals.erasures.notify(sessions)
        self._signals.requested_erasures.notify([run_id])
        while await self._database.commit(lambda connection: DeletionRepository(connection).delete_some(run_id)):
            pass
        # After the rows that only this run reads, and before the versions: they name the directories to remove.
        uris = await self._database.read(lambda connection: DeletionRepository(connection).own_weights(run_id))
        await asyncio.to_thread(remove_weights, self._weights_dir, run_id, uris)
        if self._memory_dir is not None:
            await asyncio.to_thread(remove_weights, self._memory_dir, run_id, [])
        if self._remove_stored is not None:
            await asyncio.to_thread(self._remove_stored, run_id)
        if await self._database.commit(lambda connection: DeletionRepository(connection).delete_rest(run_id)):
            _LOG.info("run deleted", run=run_id, **msgspec.to_builtins(amount))
        await self._database.commit(lambda connection: DeletionRepository(connection).drop_indexes())
        await self._database.scrub()  # SQLite would keep deleted content in free pages


def remove_weights(root: Path, run_id: str, uris: list[str]) -> None:
    """Remove a run's directory below `root`, and the directories of its versions that are elsewhere below it.

    Raise OSError if the storage refuses; missing directories count as removed.
    """
    top = root.resolve()
    for directory in (*(Path(uri).resolve() for uri in uris), top / run_id):
        # Only what is below the directory for weights, and never that itself: a uri comes from a trainer.
        if directory != top and directory.is_relative_to(top) and directory.is_dir():
            shutil.rmtree(directory)


def _hide(connection: Connection, *, name_or_id: str, confirm: str | None, is_served: bool, now: float) -> RunId:
    """Mark a run as deleted, if it may be, and append the event."""
    runs, deletion = RunRepository(connection), DeletionRepository(connection)
    found = runs.by_name_or_id(name_or_id)
    # Locked, so that neither a claim nor a run that begins from this one comes between the checks and the mark.
    run = runs.by_id(found.id, lock=True) if found is not None else None
    if run is None:
        raise NotFound(f"there is no run {name_or_id!r}")
    _check(run, runs, is_served=is_served, now=now)
    amount = deletion.amount(run.id)
    if runs.has_history(run.id):
        if run.state != RunState.ARCHIVED:
            raise Conflict(
                f"the run {run.name!r} has data and may still be in use: archive it first, with `base-rl runs archive"
                f" {run.name}`"
            )
        if confirm != run.name:
            raise InvalidRequest(
                f"{amount.sessions} sessions, {amount.turns} turns and {amount.versions} versions of {run.name!r}"
                f" would be gone for good: repeat the request with ?confirm={run.name}",
                param="confirm",
            )
    deletion.hide(run.id)
    data = {"id": run.id, "name": run.name, "base_model": run.base_model, **msgspec.to_builtins(amount)}
    append_event(connection, run_id=None, kind="run.deleted", data=data, now=now)
    return RunId(run.id)


def _check(run: AnyRow, runs: RunRepository, *, is_served: bool, now: float) -> None:
    """Raise Conflict if somebody needs the run."""
    if is_served:
        raise Conflict(f"an engine serves the run {run.name!r}: free it by `base-rl runs archive {run.name}`")
    if runs.has_leased_claims(run.id, now):
        raise Conflict(
            f"a trainer works on trajectories of the run {run.name!r}: stop it, and archive the run with"
            f" `base-rl runs archive {run.name}`"
        )
    if begun := runs.begun_from(run.id):
        raise Conflict(
            f"other runs begin from versions of {run.name!r} and share their weights: {described(begun)}; delete"
            " those first"
        )
