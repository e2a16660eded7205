"""Published weights on a file system that the proxy shares with the trainer."""

from __future__ import annotations

from pathlib import Path

from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.errors import InvalidRequest

_COMPANION = {WeightsFormat.HUGGINGFACE: "config.json", WeightsFormat.ADAPTER: "adapter_config.json"}


def verify_weights(weights: WeightsReference) -> None:
    """Raises InvalidRequest unless the directory is there and whole, by the size of its safetensors files.

    The SHA-256 is not computed: the trainer did so while writing, and checks it when it resumes.
    """
    directory = Path(weights.uri)
    if not directory.is_absolute():
        raise InvalidRequest(f"weights.uri is an absolute directory, not {weights.uri!r}", param="weights.uri")
    if not directory.is_dir():
        raise InvalidRequest(
            f"there is no directory {weights.uri}: the proxy has to see the trainer's weights under the same path",
            param="weights.uri",
        )
    files = list(directory.glob("*.safetensors"))
    companion = _COMPANION[weights.format]
    if not files or not (directory / companion).is_file():
        raise InvalidRequest(f"{weights.uri} has no {companion} and safetensors", param="weights.uri")
    found = sum(file.stat().st_size for file in files)
    if found != weights.bytes:
        raise InvalidRequest(
            f"the safetensors in {weights.uri} are {found} bytes, not {weights.bytes}", param="weights.bytes"
        )
