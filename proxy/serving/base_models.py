"""Notice an engine that was started with another base model than the run's."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path

from proxy.contract.policy import parse_weight_label
from proxy.engines.protocol import EngineInfo

# Keys of config.json that decide the shapes of the weights. Other keys, such as the dtype, may differ.
_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class BaseModelCheck:
    """Compares the model of a fresh engine with the run's base model. A pair of directories is read once."""

    def __init__(self) -> None:
        self._compared: dict[tuple[str, str], str | None] = {}

    async def problem(self, info: EngineInfo, base_model: str) -> str | None:
        """Return why the engine cannot serve versions of the base model, and what to do; None if it can.

        Only directories that this machine has can be compared: None for others, and for an engine that holds weights
        that base-rl gave it.
        """
        if parse_weight_label(info.weight_label) is not None or info.model_path == base_model:
            return None
        pair = (info.model_path, base_model)
        if pair not in self._compared:
            # In a thread: a tokenizer may have tens of megabytes.
            self._compared[pair] = await asyncio.to_thread(_difference, Path(info.model_path), Path(base_model))
        difference = self._compared[pair]
        if difference is None:
            return None
        return (
            f"it was started with {info.model_path}, whose {difference} from that of the run's base model"
            f" {base_model}: start it with that model, or take it out of the pool"
        )


def _difference(theirs: Path, ours: Path) -> str | None:
    if not (theirs.is_dir() and ours.is_dir()):
        return None
    try:
        tokenizers = [sha256((each / "tokenizer.json").read_bytes()).digest() for each in (theirs, ours)]
        if tokenizers[0] != tokenizers[1]:
            return "tokenizer.json differs"
        configs = [json.loads((each / "config.json").read_bytes()) for each in (theirs, ours)]
        for key in _SHAPE_KEYS:
            if configs[0].get(key) != configs[1].get(key):
                return f"config.json differs in {key}"
    except (OSError, ValueError, AttributeError):
        pass  # unreadable, so nothing is known: the engine itself refuses weights that do not fit
    return None
