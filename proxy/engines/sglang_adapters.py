"""Check the files of a LoRA adapter for faults that SGLang 0.5.23 accepts, and then ends at the first request."""

from __future__ import annotations

import json
from pathlib import Path

from proxy.contract.lora import ADAPTER_PART, ADAPTER_WEIGHTS
from proxy.errors import EngineFailed

# A safetensors file begins with the size of its JSON header; a larger header is no adapter's.
_SIZE_BYTES = 8
_MAX_HEADER_BYTES = 1 << 26


def check_for_sglang(path: str) -> None:
    """Raise EngineFailed unless SGLang can join the adapter's layers as it joins the model's.

    It joins q, k and v, and gate and up; of these only k_proj and up_proj may be missing. A file that cannot be read
    is left to the engine, which refuses it.
    """
    modules: dict[str, set[str]] = {}
    for name in _tensor_names(Path(path) / ADAPTER_WEIGHTS):
        if match := ADAPTER_PART.fullmatch(name):
            parent, _, child = match["layer"].rpartition(".")
            modules.setdefault(parent, set()).add(child)
    for parent, children in modules.items():
        attention = children & {"q_proj", "k_proj", "v_proj"}
        wanted = {"q_proj", "v_proj"} if attention else {"gate_proj"} if "up_proj" in children else set()
        if missing := sorted(wanted - children):
            raise EngineFailed(
                f"SGLang cannot serve the adapter in {path}: it has {', '.join(sorted(children))} of {parent} "
                f"and lacks {', '.join(missing)}. Add these to the target modules, or use the embedded engine"
            )


def _tensor_names(file: Path) -> list[str]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(_SIZE_BYTES), "little")
            header = json.loads(stream.read(size)) if size <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return []
    return list(header) if isinstance(header, dict) else []
