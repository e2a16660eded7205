"""Checksums of a version's files, recorded when it is published and compared before any of them is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from proxy.contract.policy import (
    STATE_COUNTERS,
    STATE_DIRECTORY,
    STATE_INDEX,
    UNCOMMITTED_MARK,
    Head,
    WeightsReference,
)
from trainer.errors import WeightsUnusable
from trainer.models.state_dict import digest

_BLOCK = 1 << 20


def checksums(directory: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of every file in a version's directory by its path in it.

    Of the trainer state only the index or the counters are listed; the index has the checksums of the other files of
    that folder.
    Files in `known` are not read again.
    """
    return {name: known.get(name) or _sha256(directory / name) for name in sorted(_listed(directory))}


def verify_version(head: Head, root: Path | None = None) -> Path:
    """Return the directory of the head's weights after comparing every file in it with its checksum.

    Raises WeightsUnusable for a file that differs, is missing or is not listed, and for a directory outside `root`.
    """
    weights = head.weights
    if weights is None:
        raise ValueError("version 0 has no weights of its own")
    directory = Path(weights.uri)
    if root is not None and not _is_below(directory, root):
        raise WeightsUnusable(
            f"version {head.version} is in {directory}, outside of {root}: set trainer.weights.directory to the"
            " directory in which the proxy expects weights (server.weights_dir)"
        )
    if weights.files:
        _compare(head.version, directory, weights)
    elif digest(directory) != (weights.sha256, weights.bytes):
        raise WeightsUnusable(f"{directory}: the files are not those of version {head.version} (SHA-256 differs)")
    return directory


def _compare(version: int, directory: Path, weights: WeightsReference) -> None:
    if not directory.is_dir():
        raise WeightsUnusable(f"{directory}: there is no such directory")
    present = _listed(directory)
    unlisted = sorted(present - set(weights.files))
    if unlisted:
        raise WeightsUnusable(f"{directory}: {unlisted[0]} is not a file of version {version}")
    for name, sha256 in weights.files.items():
        # The state of older versions is removed to save space.
        if name not in present and name == STATE_INDEX:
            continue
        if name not in present or _sha256(directory / name) != sha256:
            raise WeightsUnusable(f"{directory}: {name} is not that of version {version} (SHA-256 differs)")


def _listed(directory: Path) -> set[str]:
    """Return the paths of a directory's files that have a checksum of their own."""
    found = set()
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if path.is_dir() or str(name) == UNCOMMITTED_MARK:
            continue
        if name.parts[0] != STATE_DIRECTORY or name.as_posix() in (STATE_INDEX, STATE_COUNTERS):
            found.add(name.as_posix())
    return found


def _is_below(directory: Path, root: Path) -> bool:
    resolved, top = directory.resolve(), root.resolve()
    return resolved != top and resolved.is_relative_to(top)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
