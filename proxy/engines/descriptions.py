"""An engine's descriptions of itself, with the fields that the proxy reads of them."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """The answer of `/model_info`."""

    model_path: str
    weight_version: str


class SchedulerState(msgspec.Struct, frozen=True):
    """The state of one of SGLang's schedulers (`--dp-size`). Its bound also holds if no flag sets one."""

    effective_max_running_requests_per_dp: int | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """The answer of `/server_info`: the flags that the engine was started with, and the state of its schedulers.

    `adapters_from_disk`, `whole_prompts` and `loads_between_steps` are base-rl's own. An engine with `whole_prompts`
    computes every prompt at once, with the weights of its first token; SGLang continues cached prefixes and divides
    long prompts. An engine with `loads_between_steps` generates while it reads new weights.
    """

    grammar_backend: str | None = None
    enable_deterministic_inference: bool = False
    adapters_from_disk: bool = False
    whole_prompts: bool = False
    loads_between_steps: bool = False
    enable_lora: bool | None = None
    dtype: str | None = None
    quantization: str | None = None
    context_length: int | None = None
    max_loaded_loras: int | None = None
    max_running_requests: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    internal_states: list[SchedulerState] = []

    @property
    def ranks(self) -> int:
        """The number of processes that hold weights."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def max_running(self) -> int | None:
        """The number of requests that run at once, over all schedulers; None if the engine does not report it."""
        effective = [state.effective_max_running_requests_per_dp for state in self.internal_states]
        bounds = [each for each in effective if each is not None]
        return sum(bounds) if bounds else self.max_running_requests


class RankChecksums(msgspec.Struct, frozen=True):
    """The checksums of the tensors that one process of an engine holds, by the engine's own names."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct, frozen=True):
    """The answer of `/weights_checker`."""

    ranks: list[RankChecksums] = []


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`: the base model, or an adapter, which has the base as its parent."""

    id: str
    root: str
    parent: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    data: list[ServedModel]
