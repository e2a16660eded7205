"""Versions that are stored as differences to the version before, and how their files are made again, bit for bit.

A safetensors file is cut into blocks. Each block is combined with the same block of the base's file by XOR, the bytes
of its numbers are sorted by significance (all first bytes, then all second ones, …), and the result is compressed by
Zstandard. A small step leaves most high bytes as they were, which become long runs of zeros.

```
delta.json                   DeltaIndex
model.safetensors.delta      the compressed blocks, one after the other
```
Tokenizer and configuration are those of the base. Whoever gives a version to an engine makes its files first
(`LocalWeights`) and checks their SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec

from proxy.contract.policy import STATE_DIRECTORY, WeightsReference

DELTA_INDEX = "delta.json"
BLOCK = 8 << 20
"""Bytes of a block at most: what is held in memory to make a file again."""
_WIDTHS = (1, 2, 4, 8)
# Far beyond any configuration; it bounds what a hostile chain of bases can cost.
_MOST_BASES = 1000
# An engine that was told to load a version has read its files by then.
_IN_USE_SECONDS = 900.0
_LEFT_OVER_SECONDS = 3600.0


class DeltaBlock(msgspec.Struct, frozen=True, array_like=True):
    """The size of a block, its compressed size, and the bytes of each number in it."""

    size: int
    stored: int
    width: int


class DeltaFile(msgspec.Struct, frozen=True):
    """A file of the version by its SHA-256 and size, and the blocks of which it is made again."""

    sha256: str
    bytes: int
    blocks: tuple[DeltaBlock, ...]


class DeltaIndex(msgspec.Struct, frozen=True):
    """`delta.json`. `files` are the version's safetensors files."""

    base: WeightsReference
    files: dict[str, DeltaFile]


class DeltaUnusable(Exception):
    """A difference is damaged, or its base is not the version that it was made from."""


def is_delta(weights: WeightsReference) -> bool:
    """Return whether a version is stored as a difference."""
    return DELTA_INDEX in weights.files


def encode_block(new: Any, base: Any, width: int) -> bytes:
    """Return the compressed difference of two blocks of equal size (buffers of bytes)."""
    import numpy as np
    import zstandard

    difference = np.frombuffer(new, np.uint8) ^ np.frombuffer(base, np.uint8)
    # Level 1: higher levels are slower and save next to nothing, because the changed bits are random.
    return zstandard.compress(difference.reshape(-1, width).T.tobytes(), level=1)


class LocalWeights:
    """The directories from which engines read versions: their own, or, for differences, one below `cache`.

    `locate` returns the directory that a reference names, and raises if it may not be read or is missing. The cache
    is kept below `most_bytes`, except for the version that was asked for last, its base, and what was asked for in
    the last minutes, which engines may be reading. Threads and processes may share a cache.
    """

    def __init__(self, cache: Path, most_bytes: int, locate: Callable[[WeightsReference], Path]) -> None:
        self._cache = cache
        self._most_bytes = most_bytes
        self._locate = locate

    def path_of(self, weights: WeightsReference) -> str:
        """Return where `materialise` puts a version, without making it."""
        return str(self._cache / weights.sha256) if is_delta(weights) else weights.uri

    def materialise(self, weights: WeightsReference) -> tuple[WeightsReference, Path]:
        """Return a reference to a version's whole files and their directory, which are made again if need be.

        Raises DeltaUnusable, OSError, and what `locate` raises. The files of a cached version are not read again.
        """
        chain = self._chain(weights)
        whole = chain[-1][2].base if chain else weights
        at = self._locate(whole)
        for each, directory, index in reversed(chain):
            # The companions' checksums come down the chain from the last whole version.
            expanded = _expanded(each, index, whole, self._cache / each.sha256)
            if not (self._cache / each.sha256).is_dir():
                self._make(expanded, index, directory, whole, at)
            whole, at = expanded, self._cache / each.sha256
            os.utime(at)
        if chain or at.parent == self._cache:
            self._evict({at.name, *(each.sha256 for each, *_ in chain[:2])})
        return whole, at

    def discard(self, weights: WeightsReference) -> bool:
        """Remove the files that were made of a version and its bases. Return whether there were any.

        Raises what `materialise` raises."""
        made = [at for each, *_ in self._chain(weights) if (at := self._cache / each.sha256).is_dir()]
        for each in made:
            shutil.rmtree(each, ignore_errors=True)
        return bool(made)

    def chain(self, weights: WeightsReference) -> list[WeightsReference]:
        """Return a version and those that it is a difference to. Raises DeltaUnusable, OSError, and what `locate`
        raises."""
        differences = self._chain(weights)
        return [each for each, *_ in differences] + [differences[-1][2].base if differences else weights]

    def _chain(self, weights: WeightsReference) -> list[tuple[WeightsReference, Path, DeltaIndex]]:
        """Return the differences that lead from a whole version to this one, this one first."""
        chain: list[tuple[WeightsReference, Path, DeltaIndex]] = []
        while is_delta(weights):
            directory = self._locate(weights)
            index = _read_index(weights, directory)
            chain.append((weights, directory, index))
            if len(chain) > _MOST_BASES:
                raise DeltaUnusable(f"{chain[0][0].uri}: more than {_MOST_BASES} differences in a row")
            weights = index.base
        return chain

    def _make(
        self, expanded: WeightsReference, index: DeltaIndex, delta: Path, base: WeightsReference, base_at: Path
    ) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        made = self._cache / f".{expanded.sha256[:16]}-{secrets.token_hex(4)}"
        made.mkdir()
        try:
            for name, file in index.files.items():
                apply_file(base_at / name, delta / f"{name}.delta", file, made / name)
            for name in _companions(base):
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(base_at / name, made / name)
            made.rename(self._cache / expanded.sha256)
        except OSError:
            # Another process may have made it meanwhile.
            shutil.rmtree(made, ignore_errors=True)
            if not (self._cache / expanded.sha256).is_dir():
                raise
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _evict(self, needed: set[str]) -> None:
        """Remove the directories that were asked for longest ago, and what a killed process left."""
        found = sorted((each for each in self._cache.iterdir() if each.is_dir()), key=lambda each: -_used(each))
        total = 0
        for each in found:
            total += _size(each)
            unused = time.time() - _used(each)
            is_left_over = each.name.startswith(".") and unused > _LEFT_OVER_SECONDS
            is_idle = each.name not in needed and not each.name.startswith(".") and unused > _IN_USE_SECONDS
            if is_left_over or (total > self._most_bytes and is_idle):
                shutil.rmtree(each, ignore_errors=True)


def apply_file(base: Path, delta: Path, file: DeltaFile, target: Path) -> None:
    """Make a file again from its base and its difference, flushed to the disk. Raises DeltaUnusable, OSError."""
    if base.stat().st_size != file.bytes or sum(block.size for block in file.blocks) != file.bytes:
        raise DeltaUnusable(f"{base} has another size than the file that {delta} was made from")
    sha256 = hashlib.sha256()
    with base.open("rb") as before, delta.open("rb") as stored, target.open("wb") as out:
        for block in file.blocks:
            content = _decoded(before, stored, block, delta)
            sha256.update(content)
            out.write(content)
        out.flush()
        os.fsync(out.fileno())
    if sha256.hexdigest() != file.sha256:
        raise DeltaUnusable(f"{delta} and {base} do not give the file that was published: its SHA-256 differs")


def _decoded(before: IO[bytes], stored: IO[bytes], block: DeltaBlock, delta: Path) -> bytes:
    import numpy as np
    import zstandard

    if block.width not in _WIDTHS or not 0 <= block.size <= BLOCK or block.size % block.width:
        raise DeltaUnusable(f"{delta} has a block of {block.size} bytes in numbers of {block.width}")
    old = before.read(block.size)
    try:
        # Bounded: a damaged block must not fill the memory.
        planes = zstandard.ZstdDecompressor().decompress(stored.read(block.stored), max_output_size=block.size)
    except zstandard.ZstdError as error:
        raise DeltaUnusable(f"{delta} is damaged: {error}") from error
    if len(planes) != block.size or len(old) != block.size:
        raise DeltaUnusable(f"{delta} or its base is truncated")
    difference = np.frombuffer(planes, np.uint8).reshape(block.width, -1).T.reshape(-1)
    return (difference ^ np.frombuffer(old, np.uint8)).tobytes()


def _read_index(weights: WeightsReference, directory: Path) -> DeltaIndex:
    content = (directory / DELTA_INDEX).read_bytes()
    if hashlib.sha256(content).hexdigest() != weights.files[DELTA_INDEX]:
        raise DeltaUnusable(f"{DELTA_INDEX} in {weights.uri} is not the file that was published: its SHA-256 differs")
    try:
        index = msgspec.json.decode(content, type=DeltaIndex)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DeltaUnusable(f"{DELTA_INDEX} in {weights.uri} cannot be read: {error}") from error
    if any("/" in name or name.startswith(".") for name in index.files):
        raise DeltaUnusable(f"{DELTA_INDEX} in {weights.uri} names files outside of the version")
    return index


def _companions(base: WeightsReference) -> list[str]:
    """Return the files of a version that are neither weights nor the trainer's."""
    return [
        name
        for name in base.files
        if not name.endswith(".safetensors")
        and PurePosixPath(name).parts[0] not in ("/", "..", STATE_DIRECTORY)
        and ".." not in PurePosixPath(name).parts
    ]


def _expanded(weights: WeightsReference, index: DeltaIndex, base: WeightsReference, at: Path) -> WeightsReference:
    """Return the reference of a version's whole files at `at`."""
    files = {name: file.sha256 for name, file in index.files.items()}
    files |= {name: base.files[name] for name in _companions(base)}
    return msgspec.structs.replace(weights, uri=str(at), files=files)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _used(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except FileNotFoundError:
        return 0.0
