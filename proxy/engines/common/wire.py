"""The requests that base-rl's own engines accept: SGLang's field names, validated while they are decoded."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from proxy.contract.turn import Constraint, ConstraintKind

_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class RequestRefused(Exception):
    """The request is wrong. As in SGLang, the answer has status 400 and this message."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request; null means the default. Unknown fields are refused, because an option that is
    accepted and ignored would change what a caller learns from.

    `skip_special_tokens`, `spaces_between_special_tokens` and `no_stop_trim` shape SGLang's `text`. They are accepted
    and have no effect, because these engines answer with token ids alone.
    """

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = 128
    temperature: Annotated[float, Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1)] | None = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = 0.0
    presence_penalty: _Penalty | None = 0.0
    frequency_penalty: _Penalty | None = 0.0
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    n: Literal[1] | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none for null."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the answer; None without one."""
        return next(iter(self._constraints), None)

    @property
    def _constraints(self) -> list[Constraint]:
        texts = [(kind, getattr(self, kind.value)) for kind in ConstraintKind]
        return [Constraint(kind=kind, text=text) for kind, text in texts if text is not None]

    def check(self, vocabulary: int) -> None:
        """Raise RequestRefused for values that the types above do not exclude."""
        if self.top_k == 0:
            raise RequestRefused("top_k is out of its range: 0.")
        if not all(self.stop_strings):
            raise RequestRefused("stop is out of its range: it has an empty text.")
        if len(self._constraints) > 1:
            raise RequestRefused(f"Only one of {', '.join(ConstraintKind)} can be set.")
        for key in self.logit_bias or ():
            if not key.isdecimal() or int(key) >= vocabulary:
                raise RequestRefused(f"logit_bias must have keys in [0, {vocabulary - 1}], got {key}.")


_DEFAULT = Sampling()


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/generate`. Other fields are ignored, such as `extra_key`: no prefix cache outlives a request.

    Without `return_logprob` the answer has no log-probabilities at all. With a `logprob_start_len` of 0 or more it
    also has those of the input, from that token on. `lora_path` is the name of a loaded adapter, as in SGLang; null
    is the base model.
    """

    input_ids: list[int]
    sampling_params: Sampling | None = None
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Meta(ge=0, le=128)] = 0
    logprob_start_len: Annotated[int, Meta(ge=-1)] = -1
    stream: bool = False
    rid: str | None = None
    lora_path: str | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters, all defaults if the request has none."""
        return self.sampling_params or _DEFAULT


_Body = TypeVar("_Body", bound=GenerateBody)


class BodyReader(Generic[_Body]):
    """Decodes the bodies of `/generate` for one model; `kind` is the engine's own body type. `vocabulary` is a number
    of tokens, `context` the most tokens of a prompt with its answer."""

    def __init__(self, kind: type[_Body], *, vocabulary: int, context: int) -> None:
        self._vocabulary = vocabulary
        self._context = context
        # A type with the model's vocabulary in it, so that msgspec compares the ids while it decodes them.
        token = Annotated[int, Meta(ge=0, lt=vocabulary)]
        bounded = msgspec.defstruct(
            kind.__name__, [("input_ids", list[token])], bases=(kind,), frozen=True, kw_only=True
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(bounded)

    def read(self, content: bytes) -> tuple[_Body, int]:
        """Return the body and the bound on new tokens. Raises RequestRefused."""
        try:
            body: _Body = self._decoder.decode(content)
        except msgspec.DecodeError as error:
            raise RequestRefused(str(error)) from error
        sampling, prompt, context = body.sampling, len(body.input_ids), self._context
        if not prompt:
            raise RequestRefused("input_ids cannot be empty.")
        if prompt >= context:
            raise RequestRefused(
                f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        if body.logprob_start_len >= prompt:
            raise RequestRefused(f"logprob_start_len must be in [-1, {prompt - 1}], below the input's length.")
        limit = context - prompt - 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
        if prompt + limit > context:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: "
                f"{prompt} tokens of input and {limit} tokens for the completion."
            )
        sampling.check(self._vocabulary)
        return body, limit


class DiskUpdate(msgspec.Struct, frozen=True):
    """The body of `/update_weights_from_disk`. SGLang's `flush_cache` is ignored: no prefix cache outlives a
    request."""

    model_path: str
    weight_version: str | None = None


class VersionUpdate(msgspec.Struct, frozen=True):
    """The body of `/update_weight_version`, with SGLang's default."""

    new_version: str
    abort_all_requests: bool = True


class WeightsCheck(msgspec.Struct, frozen=True):
    """The body of `/weights_checker`, with SGLang's default."""

    action: str = "checksum"


class Pause(msgspec.Struct, frozen=True):
    """The body of `/pause_generation`, with SGLang's default."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(msgspec.Struct, frozen=True):
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


class AdapterLoad(msgspec.Struct, frozen=True):
    """The body of `/load_lora_adapter`. A pinned adapter is never put aside for another one."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=512)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    pinned: bool = False


class AdapterUnload(msgspec.Struct, frozen=True):
    """The body of `/unload_lora_adapter`."""

    lora_name: str
