"""The requests that the embedded engine accepts, and the sampling rules that follow from them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from proxy.contract.exchange import GroupBackend
from proxy.contract.turn import Constraint
from proxy.engines.common.wire import GenerateBody

# Temperatures below this one are greedy, as in SGLang.
_GREEDY_BELOW = 1e-6

SentDtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
"""torch's names of the dtypes that a trainer may send."""


class EmbeddedBody(GenerateBody, frozen=True, kw_only=True):
    """The body of `/generate`."""

    # Less than the wire format allows: every reported token costs a sort of the whole vocabulary.
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] = 0


class TensorUpdate(msgspec.Struct, frozen=True):
    """The body of `/update_weights_from_tensor`: base64 texts, each a whole safetensors file."""

    serialized_named_tensors: list[str]
    weight_version: str | None = None


class GroupJoin(msgspec.Struct, frozen=True):
    """The body of `/init_weights_update_group`, with SGLang's defaults."""

    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: Annotated[str, Meta(min_length=1)] = "weight_update_group"
    backend: GroupBackend = GroupBackend.NCCL


class DistributedUpdate(msgspec.Struct, frozen=True):
    """The body of `/update_weights_from_distributed`. SGLang's `flush_cache` is ignored: no prefix cache outlives a
    request. Its other `load_format`, several tensors sent as one, is refused."""

    names: list[str]
    dtypes: list[SentDtype]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: None = None


class GroupLeave(msgspec.Struct, frozen=True):
    """The body of `/destroy_weights_update_group`, with SGLang's default."""

    group_name: str = "weight_update_group"


class SamplingRules(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling parameters of one request. `top_k` 0 means no cut, `seed` None a draw that cannot be
    repeated."""

    max_new_tokens: int
    greedy: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: tuple[tuple[int, float], ...]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    constraint: Constraint | None = None
    top_logprobs: int = 0

    @property
    def cuts(self) -> bool:
        """Whether top-p, top-k or min-p remove tokens from the distribution."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def adjusts(self) -> bool:
        """Whether penalties or a bias change the logits."""
        return bool(self.logit_bias) or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def rules_of(body: EmbeddedBody, *, limit: int) -> SamplingRules:
    """Return the rules of a request that generates at most `limit` tokens."""
    asked = body.sampling
    greedy = asked.temperature is not None and asked.temperature < _GREEDY_BELOW
    return SamplingRules(
        max_new_tokens=limit,
        greedy=greedy,
        temperature=1.0 if asked.temperature is None or greedy else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=0 if asked.top_k in {None, -1} else asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=asked.sampling_seed,
        logit_bias=tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
        stop=asked.stop_strings,
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        constraint=asked.constraint,
        top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
    )
