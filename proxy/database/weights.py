"""The weights of a policy version as its row has them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from proxy.contract.policy import WeightsFormat, WeightsReference


def weights_of(row: Row[*tuple[Any, ...]], *, with_files: bool = True) -> WeightsReference | None:
    """Return where a version's weights are; None for the base model. Without `with_files` the row needs no
    checksums, and people who list versions do not see them."""
    if row.weights_uri is None:
        return None
    return WeightsReference(
        uri=row.weights_uri,
        format=WeightsFormat(row.weights_format),
        sha256=row.weights_sha256,
        bytes=row.weights_bytes,
        files=(row.weights_files or {}) if with_files else {},
    )
