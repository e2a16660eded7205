"""Checksums of a version's tensors as engines compute them over what they have in memory."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from proxy.versions.safetensors import FLOATS, read_header

# Engines on a CPU compute such checksums, and serve models that are not large. Reading more would delay the version.
_MAX_BYTES = 2 << 30
_DIGITS = 16
# SGLang concatenates the outputs of these layers.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_NAME = re.compile(r"^(.*\.)(qkv_proj|gate_up_proj)(\..*)$")


def is_float32(directory: Path) -> bool:
    """Return whether all floats of a version are float32: as the trainer has them, and not rounded to be published.

    Raises OSError and WeightsRejected where files are gone or damaged meanwhile.
    """
    files = list(directory.glob("*.safetensors"))
    dtypes = {entry.dtype for file in files for entry in read_header(file).tensors.values()}
    return dtypes & FLOATS == {"F32"}


class TensorDigests:
    """The float32 tensors of a version of whole weights. Raises OSError and WeightsRejected where files are gone or
    damaged meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, tuple[Path, int, int]] = {}
        files = sorted(directory.glob("*.safetensors"))
        if sum(file.stat().st_size for file in files) > _MAX_BYTES:
            return
        for file in files:
            header = read_header(file)
            for name, entry in header.tensors.items():
                if entry.dtype == "F32":
                    place = (file, header.data_start + entry.begin, entry.end - entry.begin)
                    self._places[name] = place

    def digest(self, name: str) -> str | None:
        """Return the checksum that an engine has under this name of its own: the first 8 bytes of the SHA-256 over
        the tensor, or over those that the engine has as one. None if the version has no such tensors."""
        fused = _FUSED_NAME.match(name)
        parts = [name] if fused is None else [f"{fused[1]}{part}{fused[3]}" for part in _FUSED[fused[2]]]
        if any(part not in self._places for part in parts):
            return None
        sha256 = hashlib.sha256()
        for part in parts:
            file, begin, size = self._places[part]
            with file.open("rb") as stream:
                stream.seek(begin)
                sha256.update(stream.read(size))
        return sha256.hexdigest()[:_DIGITS]
