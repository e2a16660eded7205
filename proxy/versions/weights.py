"""Check published weights, when a trainer commits them and again before an engine loads them."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from proxy.contract.lora import ADAPTER_CONFIG
from proxy.contract.policy import STATE_DIRECTORY, UNCOMMITTED_MARK, WeightsFormat, WeightsReference
from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.versions.safetensors import Header, TensorEntry, read_header, scan
from proxy.versions.shapes import check_adapter, check_index, check_whole

_COMPANION = {WeightsFormat.HUGGINGFACE: "config.json", WeightsFormat.ADAPTER: ADAPTER_CONFIG}
_INDEX = "model.safetensors.index.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Far beyond any real version; the bounds keep a wrong directory or a hostile request from costing much.
_MAX_FILES = 4096
_MAX_PATH = 1024

Signature = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, inodes and change times of a version's files; equal signatures mean unchanged files."""


class BaseModel(msgspec.Struct, frozen=True):
    """The tensors and the configuration of the run's base model, with which versions are compared."""

    tensors: dict[str, TensorEntry]
    config: dict[str, Any]


def read_base(directory: Path) -> BaseModel | None:
    """Read the headers of a base model's safetensors files; None if there are none, or they cannot be read."""
    tensors: dict[str, TensorEntry] = {}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= read_header(file).tensors
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, WeightsRejected):
        return None
    return BaseModel(tensors, config) if tensors and isinstance(config, dict) else None


def locate(weights: WeightsReference, root: Path) -> Path:
    """Return a version's directory, after checking that it exists below the storage `root`.

    Raises WeightsRejected for a path that cannot be valid, WeightsMissing if there is no such directory,
    StorageUnavailable if the storage cannot be read.
    """
    resolved = resolve_below(weights, root)
    try:
        if resolved.is_dir():
            return resolved
        is_storage_there = resolved.parent.is_dir()
    except OSError as error:
        raise StorageUnavailable(f"{weights.uri} cannot be read: {error.strerror or error}") from error
    raise WeightsMissing(
        f"there is no directory {weights.uri}: the proxy has to see the trainer's weights under the same path",
        param="weights.uri",
        is_storage_there=is_storage_there,
    )


def resolve_below(weights: WeightsReference, root: Path) -> Path:
    """Return the path of a version's directory, which need not exist, after checking that it is below `root`.

    Raises WeightsRejected for a path that cannot be valid, StorageUnavailable if the storage cannot be read.
    """
    if len(weights.uri) > _MAX_PATH or "\0" in weights.uri:
        raise WeightsRejected(f"weights.uri must be a path of at most {_MAX_PATH} characters", param="weights.uri")
    directory = Path(weights.uri)
    if not directory.is_absolute():
        raise WeightsRejected(f"weights.uri must be an absolute directory, not {weights.uri!r}", param="weights.uri")
    try:
        resolved, top = directory.resolve(), root.resolve()
        if resolved == top or not resolved.is_relative_to(top):
            raise WeightsRejected(
                f"{weights.uri} is outside the directory for weights, {top}: set trainer.weights.directory to that,"
                " or server.weights_dir to where trainers publish",
                param="weights.uri",
            )
        resolved.exists()  # raises for a name that is too long
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise WeightsRejected(
                "a name in weights.uri is longer than the file system allows", param="weights.uri"
            ) from error
        raise StorageUnavailable(f"{weights.uri} cannot be read: {error.strerror or error}") from error
    return resolved


def check_files(weights: WeightsReference, directory: Path) -> Signature:
    """Check that a directory has the listed files and no others, and return their signature.

    The trainer's state is left out: no engine reads it, and the trainer checks those files before it reads them.
    Raises WeightsRejected, OSError.
    """
    check_listed(weights)
    companion = _COMPANION[weights.format]
    present = list_files(directory)
    found = [name for name in present if "/" not in name and name.endswith(".safetensors")]
    if not found or companion not in present:
        raise WeightsRejected(f"{weights.uri} has no {companion} and safetensors", param="weights.uri")
    if weights.files:
        wanted = {name for name in weights.files if PurePosixPath(name).parts[0] != STATE_DIRECTORY}
        if wanted - set(present):
            raise WeightsMissing(f"{min(wanted - set(present))} is missing in {weights.uri}")
        if set(present) - wanted:
            raise WeightsRejected(f"{min(set(present) - wanted)} in {weights.uri} is not listed in weights.files")
        if len(found) == 1 and weights.files[found[0]] != weights.sha256:
            raise WeightsRejected("weights.sha256 and weights.files differ", param="weights.sha256")
    size = sum(present[name].st_size for name in found)
    if size != weights.bytes:
        raise WeightsRejected(
            f"the safetensors in {weights.uri} are {size} bytes, not {weights.bytes}", param="weights.bytes"
        )
    return tuple((name, stat.st_size, stat.st_ino, stat.st_ctime_ns) for name, stat in sorted(present.items()))


def check_listed(weights: WeightsReference) -> None:
    """Check the names and checksums of a version's files. Raises WeightsRejected."""
    if len(weights.files) > _MAX_FILES:
        raise WeightsRejected(f"a version has at most {_MAX_FILES} files", param="weights.files")
    for name, sha256 in weights.files.items():
        path = PurePosixPath(name)
        is_inside = path.parts and not path.is_absolute() and ".." not in path.parts and "\0" not in name
        if not is_inside or not _SHA256.fullmatch(sha256):
            raise WeightsRejected(
                f"{name!r} is not the name of a file of the version with its SHA-256", param="weights.files"
            )


def check_headers(weights: WeightsReference, directory: Path, base: BaseModel | None) -> dict[str, Header]:
    """Check the tensors that the files' headers describe, and return the headers by file name.

    Raises WeightsRejected, OSError.
    """
    headers = {file.name: read_header(file) for file in sorted(directory.glob("*.safetensors"))}
    tensors: dict[str, TensorEntry] = {}
    for name, header in headers.items():
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise WeightsRejected(f"{min(twice)} is in {name} and in another file")
        tensors |= header.tensors
    if weights.format is WeightsFormat.ADAPTER:
        adapter = _read_json(directory / _COMPANION[WeightsFormat.ADAPTER])
        check_adapter(tensors, adapter, None if base is None else base.tensors)
        return headers
    if (directory / _INDEX).exists():
        check_index(_read_json(directory / _INDEX), {file: header.tensors for file, header in headers.items()})
    if base is not None:
        check_whole(tensors, base.tensors, base.config)
    return headers


def check_base(weights: WeightsReference, directory: Path, base_model: str) -> None:
    """Raise WeightsRejected for an adapter of another model than `base_model`, the run's.

    Only directories on this machine are compared: a Hugging Face id and a directory may be one model.
    """
    if weights.format is not WeightsFormat.ADAPTER:
        return
    named = _read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    own, wanted = Path(str(named)), Path(base_model)
    if own.is_dir() and wanted.is_dir() and not own.samefile(wanted):
        raise WeightsRejected(f"it is an adapter of {named}, and the run's base model is {base_model}")


def check_content(
    weights: WeightsReference,
    directory: Path,
    headers: dict[str, Header],
    is_cancelled: Callable[[], bool],
    squares: dict[str, float] | None = None,
) -> None:
    """Read every file once and check that its checksum is the listed one and its numbers are finite.

    `squares` gets sums of squares as in `scan`. Raises WeightsRejected, OSError, and InterruptedError once
    `is_cancelled` returns True.
    """
    overall = hashlib.sha256()
    for name in sorted(list_files(directory)):
        if name in headers:
            digest = scan(directory / name, headers[name], is_cancelled, squares)
        else:
            with (directory / name).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if weights.files and digest != weights.files[name]:
            raise WeightsRejected(f"{name} is not the file that was published: its SHA-256 differs")
        if not weights.files and list(headers) == [name] and digest != weights.sha256:
            raise WeightsRejected(f"{name} is not the file that was committed: its SHA-256 differs")
    # Versions committed before base-rl listed all files have one checksum over all safetensors files.
    if not weights.files and len(headers) > 1:
        for name in headers:
            with (directory / name).open("rb") as stream:
                while block := stream.read(1 << 20):
                    overall.update(block)
        if overall.hexdigest() != weights.sha256:
            raise WeightsRejected("the safetensors are not those that were committed: their SHA-256 differs")


def list_files(directory: Path) -> dict[str, Any]:
    """Return the status of every file below a version's directory that engines may read; links are refused."""
    found: dict[str, Any] = {}
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if name.parts[0] in (STATE_DIRECTORY, UNCOMMITTED_MARK) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise WeightsRejected(f"{name} is not a regular file")
        found[name.as_posix()] = path.stat()
        if len(found) > _MAX_FILES:
            raise WeightsRejected(f"a version has at most {_MAX_FILES} files")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise WeightsRejected(f"{path.name} is not JSON") from error
    if not isinstance(found, dict):
        raise WeightsRejected(f"{path.name} is not a JSON object")
    return found
