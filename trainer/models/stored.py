"""Read parts of the tensors in a directory's safetensors files, with the memory of one block at a time.

Files are read and not mapped into memory: pages of a mapping count as the process's memory once they are touched, and
each rank of a divided model may only need its own part.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from trainer.errors import WeightsUnusable
from trainer.parallel.state_files import DTYPES

_BLOCK = 8 << 20
"""Bytes that are read at once: enough that calls cost nothing, and little beside any model worth dividing."""
_MOST_HEADER = 100 << 20
"""Bytes of the longest header that the format allows."""
_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class _Place(NamedTuple):
    """Where a tensor is: its file, its first byte there, and what the bytes are."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredTensors:
    """The tensors of a directory by name. Headers are read at once, contents by `read_into`.

    Raises WeightsUnusable, from both, for files that are missing, damaged or cut off.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._places: dict[str, _Place] = {}
        for file in weight_files(directory):
            try:
                self._places |= _places_of(file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise WeightsUnusable(f"{file}: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._places)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name."""
        return {name: place.shape for name, place in self._places.items()}

    def read_into(self, name: str, target: Tensor, offsets: Sequence[int] | None = None) -> None:
        """Fill `target`, of any dtype and device, with the part of a stored tensor that begins at `offsets` (one for
        each dimension; default: at the start of each) and has the shape of `target`.

        Rows that the part spans are read whole, so a part of the first dimension costs no more bytes than it has.
        Raises KeyError for an unknown name, and ValueError for a part that the tensor does not have.
        """
        place = self._places[name]
        begin = tuple(offsets) if offsets is not None else (0,) * target.dim()
        ranges = zip(begin, target.shape, place.shape, strict=False)
        if not len(begin) == target.dim() == len(place.shape) or any(
            first < 0 or first + count > most for first, count, most in ranges
        ):
            raise ValueError(f"{name} of shape {place.shape} has no part {tuple(target.shape)} at {begin}")
        if target.numel() == 0:
            return
        try:
            with place.file.open("rb", buffering=0) as stream:
                _read(stream, place, target, begin)
        except OSError as error:
            raise WeightsUnusable(f"{place.file}: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a version in order of their names. Raises WeightsUnusable if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsUnusable(f"{directory} has no safetensors files")
    return files


def _places_of(file: Path) -> dict[str, _Place]:
    """Read the header of a file. Raises ValueError if it does not describe the file's bytes."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        if length > min(_MOST_HEADER, size - 8):
            raise ValueError("the header is longer than the file, which is damaged or no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
        begin, end = entry["data_offsets"]
        place = _Place(file, 8 + length + begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if begin < 0 or end - begin != math.prod(place.shape) * place.dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"the file is too short for {name}, or its header is wrong: it is damaged or cut off")
        places[name] = place
    return places


def _read(stream: IO[bytes], place: _Place, target: Tensor, begin: Sequence[int]) -> None:
    if not place.shape:
        target.copy_(_next_rows(stream, place, 0, 1, 1)[0])
        return
    row = math.prod(place.shape[1:])
    at_once = max(1, _BLOCK // max(1, row * place.dtype.itemsize))
    columns = tuple(slice(first, first + count) for first, count in zip(begin[1:], target.shape[1:], strict=True))
    for done in range(0, len(target), at_once):
        count = min(at_once, len(target) - done)
        rows = _next_rows(stream, place, begin[0] + done, count, row).view(count, *place.shape[1:])
        target[done : done + count].copy_(rows[(slice(None), *columns)])


def _next_rows(stream: IO[bytes], place: _Place, first: int, count: int, width: int) -> Tensor:
    """Return rows of a stored tensor, flat, in its dtype."""
    stream.seek(place.begin + first * width * place.dtype.itemsize)
    content = bytearray(count * width * place.dtype.itemsize)
    view, filled = memoryview(content), 0
    while filled < len(content):
        read = stream.readinto(view[filled:])  # type: ignore[attr-defined]
        if not read:
            raise OSError("the file ended early: it has been changed since its header was read")
        filled += read
    return torch.frombuffer(content, dtype=place.dtype)
