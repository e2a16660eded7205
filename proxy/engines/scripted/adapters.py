"""LoRA adapters of the scripted engine: names without weights, and scores that depend on the adapter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from proxy.engines.common.wire import AdapterLoad, RequestRefused

# Scores are multiples of this one, down to -8: they differ by far more than any tolerance of a comparison.
_SCORE_STEP = 1 / 128
_SCORES = 1 << 10


class NamedAdapters:
    """The loaded adapters, paths by name.

    With `ignored` the engine accepts names and serves the base model for all of them, without a word of it in its
    answers: the fault that a probe of the proxy has to find.
    """

    def __init__(self, *, ignored: bool) -> None:
        self.paths: dict[str, str] = {}
        self.ignored = ignored

    def load(self, body: AdapterLoad) -> None:
        """Add an adapter. Raises RequestRefused if the directory holds none, or the name stands for another path."""
        if not (Path(body.lora_path) / "adapter_config.json").is_file():
            raise RequestRefused(f"{body.lora_path} is no adapter: there is no adapter_config.json")
        if self.paths.setdefault(body.lora_name, body.lora_path) != body.lora_path:
            raise RequestRefused(
                f"LoRA adapter {body.lora_name} is already loaded from {self.paths[body.lora_name]}: give these "
                "weights another name"
            )

    def unload(self, name: str) -> None:
        """Remove an adapter; running requests keep its name. Raises RequestRefused for an unknown name."""
        if self.paths.pop(name, None) is None:
            raise RequestRefused(f"LoRA adapter {name} is not loaded")

    def require(self, name: str | None) -> str | None:
        """Return the name to label tokens with; None for the base model. Raises RequestRefused for an unknown one."""
        if name is not None and name not in self.paths:
            raise RequestRefused(f"LoRA adapter {name} is not loaded: load it by /load_lora_adapter first")
        return None if self.ignored else name


def scores(ids: Sequence[int], weights: str) -> list[float]:
    """Return stand-ins for the log-probabilities of all ids after the first. They depend on all ids so far and on
    `weights`, the path of the adapter or, without one, of the model."""
    found: list[float] = []
    state = zlib.crc32(weights.encode())
    for token in ids:
        state = zlib.crc32(token.to_bytes(8, "little"), state)
        found.append(-(state % _SCORES) * _SCORE_STEP)
    return found[1:]
