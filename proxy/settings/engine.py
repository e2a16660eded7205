"""The inference engine."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from proxy.settings.section import Section


class EngineKind(StrEnum):
    EMBEDDED = "embedded"
    SGLANG = "sglang"
    SCRIPTED = "scripted"


def _default_sglang_venv() -> Path:
    """Return the directory that `make sglang-cpu` installs into."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "base-rl" / "sglang-cpu-0.5.23"


# Names of engines stand in commands, paths and logs.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
# Names that `base-rl up` gives its own engines.
_TAKEN_NAME = re.compile(r"^engine(-\d+)?$")


def _engine_name(name: str) -> str:
    if _TAKEN_NAME.match(name):
        raise ValueError("engine, engine-2 and so on are the names of the engines of [engine]: choose another name")
    return name


EngineName = Annotated[str, StringConstraints(pattern=_NAME), AfterValidator(_engine_name)]


class NamedEngineSettings(Section):
    """A further engine, `[engines.NAME]`: a running server that speaks SGLang's native API."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^/]")]
    run: str | None = None
    """Name of the one run that the engine serves; without it, any run of its base model."""
    model: str | None = None
    """The base model that the engine was started with; default: that of `run`, or of `[run]`."""


def _known_engine(kind: str) -> str:
    if kind in tuple(EngineKind) or re.match(r"https?://[^/]", kind):
        return kind
    raise ValueError(f"{kind!r} is none of embedded, sglang, scripted, or the URL (http://…) of a running SGLang")


class EngineSettings(Section):
    """The inference engine: `embedded`, `sglang`, `scripted`, or the URL of a server that speaks SGLang's native
    API."""

    kind: Annotated[str, AfterValidator(_known_engine)] = EngineKind.EMBEDDED.value
    url: str | None = None
    """Address of the engine. `base-rl up` fills it in for the engines that it starts."""
    replicas: PositiveInt = 1
    """How many engines of this kind `base-rl up` starts, each with its own port and log."""
    replica_urls: tuple[str, ...] = ()
    """Addresses of the engines beside the first. `base-rl up` fills them in."""
    connect_timeout_seconds: PositiveFloat = 5.0
    read_timeout_seconds: PositiveFloat = 600.0
    """Longest wait for the first token of a streamed answer, and for the whole of one that is not streamed."""
    stall_timeout_seconds: PositiveFloat = 300.0
    """Longest wait between two tokens of a streamed answer, never above the read timeout. Pauses for weight updates
    by this proxy do not count."""
    health_interval_seconds: PositiveFloat = 1.0
    health_timeout_seconds: PositiveFloat = 10.0
    """An engine that answers nothing at all for this long is taken to be hung: calls in flight fail, and new ones are
    refused until it answers again."""
    max_concurrency: PositiveInt = 512
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of engines that `base-rl up` starts; `auto`: the GPU where nvidia-smi finds one."""
    tensor_parallel: PositiveInt = 1
    """GPUs that divide the model of one SGLang, on one machine (its `--tp-size`)."""
    threads: PositiveInt = 1
    """CPU threads of engines that `base-rl up` starts."""
    max_loras: PositiveInt = 16
    """Most LoRA adapters in the memory of an engine that `base-rl up` starts, for runs with `weights = "adapter"`.
    The least recently used one makes room for another, and is read again when it is asked for."""
    max_lora_rank: PositiveInt = 64
    """Highest rank of such an adapter."""
    sglang_venv: Path = Field(default_factory=_default_sglang_venv)
    """The environment that SGLang is installed in (`make sglang-cpu`, or one of your own on a GPU machine)."""
    script: Path | None = None
    """The rules of the scripted engine; default: it repeats the last message."""

    @field_validator("replicas")
    @classmethod
    def _only_local_engines_have_replicas(cls, replicas: int, info: ValidationInfo) -> int:
        kind = info.data.get("kind")
        if replicas > 1 and kind is not None and kind not in tuple(EngineKind):
            raise ValueError(
                f"`base-rl up` starts no engine for the address {kind}: name each further engine in an [engines.NAME]"
                " table"
            )
        return replicas

    @field_validator("tensor_parallel")
    @classmethod
    def _only_sglang_divides_a_model(cls, tensor_parallel: int, info: ValidationInfo) -> int:
        kind = info.data.get("kind")
        if tensor_parallel > 1 and kind is not None and kind != EngineKind.SGLANG:
            raise ValueError(f"only SGLang that base-rl starts divides a model, and engine.kind is {kind!r}")
        return tensor_parallel

    @field_validator("script")
    @classmethod
    def _only_the_scripted_engine_reads_it(cls, script: Path | None, info: ValidationInfo) -> Path | None:
        kind = info.data.get("kind")
        if script is not None and kind != EngineKind.SCRIPTED:
            raise ValueError(
                f"only the scripted engine reads a script (--engine scripted), and engine.kind is {kind!r}"
            )
        return script
