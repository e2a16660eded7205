"""Runs that begin from a version of another run: their version 0 has that version's weights.

The weights are shared, not copied: both runs refer to one directory. The other run cannot be deleted, and retention
does not remove that version (`versions/retention.py`), while a run that begins from it exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.contract.identifiers import RunId
from proxy.contract.policy import MAX_VERSION, VersionState, WeightsReference
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest
from proxy.lifecycle.weights import weights_of
from proxy.runs.repository import RunRepository

CheckWeights = Callable[[WeightsReference, str], Awaitable[None]]
"""Check the files of published weights, for a base model. Raises WeightsRejected, WeightsMissing and
StorageUnavailable."""

_PARAMETER = "from"


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """A version from which a run begins. `weights_kind` is that of its run, `full` or `adapter`. `columns` are the
    columns of the version's row that describe its weights; they are null for a base model."""

    run_id: RunId
    run: str
    version: int
    base_model: str
    weights_kind: str
    weights: WeightsReference | None
    columns: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.run}@{self.version}"


class Beginnings:
    """Finds and checks the versions from which new runs begin."""

    def __init__(self, database: Database, check_weights: CheckWeights) -> None:
        self._database = database
        self._check_weights = check_weights

    async def find(self, origin: str) -> Beginning:
        """Return the version that `NAME@VERSION` names, after a check of its files, which reads all of them.

        Raise InvalidRequest for a version from which no run can begin, WeightsRejected for damaged files and
        StorageUnavailable if they cannot be read now.
        """
        found = await self._database.read(lambda connection: find_beginning(connection, origin))
        if found.weights is not None:
            await self._check_weights(found.weights, found.base_model)
        return found


def find_beginning(connection: Connection, origin: str, *, lock: bool = False) -> Beginning:
    """Return the version that `NAME@VERSION` names. With `lock`, its run is neither pruned nor deleted until the
    transaction ends. Raise InvalidRequest that says what to do."""
    name, version = _parsed(origin)
    repository = RunRepository(connection)
    run = repository.by_name(name, lock=lock)
    if run is None:
        raise InvalidRequest(
            f"from: there is no run {name!r} to begin from; `base-rl runs list` shows the runs", param=_PARAMETER
        )
    row = _checked(repository.version(run.id, version), origin, run.head_version)
    weights = weights_of(row)
    return Beginning(
        run_id=RunId(run.id),
        run=run.name,
        version=version,
        base_model=run.base_model,
        weights_kind=run.config.get("weights", "full"),
        weights=weights,
        columns={name: getattr(row, name) for name in _COLUMNS} if weights is not None else {},
    )


def refuse_other_weights(beginning: Beginning, *, base_model: str, weights: str) -> None:
    """Raise InvalidRequest if a run on this base model, with this kind of weights, cannot begin from the version."""
    if beginning.base_model != base_model:
        raise InvalidRequest(
            f"from: {beginning.name} has the base model {beginning.base_model}, and weights fit no other one: begin"
            f" this run on that model, not on {base_model}",
            param=_PARAMETER,
        )
    if beginning.weights_kind != weights:
        raise InvalidRequest(
            f"from: the versions of {beginning.run!r} are of the kind weights = {beginning.weights_kind!r}: give this"
            f" run that kind too, not {weights!r}",
            param=_PARAMETER,
        )


def begun_from(row: AnyRow) -> str | None:
    """Return the version from which the run of this row began, such as `shop@12`; None for a base model."""
    return None if row.begun_from_run is None else f"{row.begun_from_run}@{row.begun_from_version}"


_COLUMNS = ("weights_uri", "weights_format", "weights_sha256", "weights_bytes", "weights_files", "probe")


def _parsed(origin: str) -> tuple[str, int]:
    name, separator, digits = origin.rpartition("@")
    is_version = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(MAX_VERSION))
    if not separator or not name or not is_version or int(digits) > MAX_VERSION:
        raise InvalidRequest(
            f"from: write the run and the version, such as 'shop@12', not {origin!r}", param=_PARAMETER
        )
    return name, int(digits)


def _checked(row: AnyRow | None, origin: str, head: int) -> AnyRow:
    """Return the row. Raise InvalidRequest if the version does not exist, was rejected, or has no weights any
    more."""
    remedy = f"; the newest good version of that run is {head}"
    if row is None:
        raise InvalidRequest(f"from: there is no version {origin}{remedy}", param=_PARAMETER)
    if row.state == VersionState.REJECTED:
        raise InvalidRequest(f"from: {origin} was rejected ({row.rejected_because}){remedy}", param=_PARAMETER)
    if row.weights_removed_at is not None:
        raise InvalidRequest(
            f"from: the weights of {origin} were removed to save space (trainer.weights.keep_versions){remedy}",
            param=_PARAMETER,
        )
    return row
