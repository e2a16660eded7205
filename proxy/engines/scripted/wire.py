"""What this engine accepts over HTTP: SGLang's field names, validated while they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from proxy.contract.turn import Constraint, ConstraintKind

Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request. Temperature, cuts, penalties, bias and seed are checked and shape nothing: the
    script decides, and there is no distribution. Fields that are not listed are refused."""

    max_new_tokens: Annotated[int, Meta(ge=1)] | None = 128
    temperature: Annotated[float, Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Meta(ge=-1)] | None = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = 0.0
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
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
    def constraints(self) -> list[Constraint]:
        """Those that are set; one at most is allowed."""
        texts = [(kind, getattr(self, kind.value)) for kind in ConstraintKind]
        return [Constraint(kind=kind, text=text) for kind, text in texts if text is not None]


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/generate`; further fields are passed over, such as `extra_key`: no cache outlives a request."""

    input_ids: list[int]
    sampling_params: Sampling | None = None
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Meta(ge=0, le=128)] = 0
    stream: bool = False
    rid: str | None = None


class DiskUpdate(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str | None = None


class VersionUpdate(msgspec.Struct, frozen=True):
    new_version: str
    abort_all_requests: bool = True


class Pause(msgspec.Struct, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(msgspec.Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


class RequestRefused(Exception):
    """The request is wrong; answered as SGLang does, with status 400 and the message."""


class BodyReader:
    """Reads the bodies of `/generate` for one model."""

    def __init__(self, *, vocabulary: int, context: int) -> None:
        self._vocabulary = vocabulary
        self._context = context
        token = Annotated[int, Meta(ge=0, lt=vocabulary)]
        bounded = msgspec.defstruct(
            "GenerateBody", [("input_ids", list[token])], bases=(GenerateBody,), frozen=True, kw_only=True
        )
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(bounded)

    def read(self, content: bytes) -> tuple[GenerateBody, Sampling, int]:
        """The body, its sampling, and the bound on new tokens. Raises RequestRefused."""
        try:
            body: GenerateBody = self._decoder.decode(content)
        except msgspec.DecodeError as error:
            raise RequestRefused(str(error)) from error
        sampling = body.sampling_params or _DEFAULT
        prompt, context = len(body.input_ids), self._context
        if not prompt:
            raise RequestRefused("input_ids cannot be empty.")
        if prompt >= context:
            raise RequestRefused(
                f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        limit = context - prompt - 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
        if prompt + limit > context:
            raise RequestRefused(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: "
                f"{prompt} tokens of input and {limit} tokens for the completion."
            )
        self._check(sampling)
        return body, sampling, limit

    def _check(self, sampling: Sampling) -> None:
        if sampling.top_k == 0:
            raise RequestRefused("top_k is out of its range: 0.")
        if sampling.stop is not None and not all(
            [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
        ):
            raise RequestRefused("stop is out of its range: it has an empty text.")
        if len(sampling.constraints) > 1:
            raise RequestRefused(f"Only one of {', '.join(ConstraintKind)} can be set.")
        for key in sampling.logit_bias or ():
            if not key.isdecimal() or int(key) >= self._vocabulary:
                raise RequestRefused(f"logit_bias must have keys in [0, {self._vocabulary - 1}], got {key}.")


_DEFAULT = Sampling()
