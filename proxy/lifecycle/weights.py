"""The reference to a policy version's weights, from its row."""

from __future__ import annotations

from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.database.rows import AnyRow


def weights_of(row: AnyRow, *, with_files: bool = True) -> WeightsReference | None:
    """Return the version's weights; None for the base model, which has none of its own.

    Without `with_files` the row needs no `weights_files` column: lists of versions leave the checksums out.
    """
    if row.weights_uri is None:
        return None
    return WeightsReference(
        uri=row.weights_uri,
        format=WeightsFormat(row.weights_format),
        sha256=row.weights_sha256,
        bytes=row.weights_bytes,
        files=(row.weights_files or {}) if with_files else {},
    )
