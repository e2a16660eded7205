"""What this engine accepts over HTTP: SGLang's field names, validated before anything reaches the model thread."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from proxy.contract.turn import Constraint, ConstraintKind

MOST_TOP_LOGPROBS = 20
GREEDY_BELOW = 1e-6
"""Temperatures under this are greedy, as in SGLang."""


class RequestRefused(Exception):
    """The request is wrong; answered as SGLang does, with status 400 and the message."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params` of a request.

    `skip_special_tokens`, `spaces_between_special_tokens` and `no_stop_trim` shape SGLang's `text`; this engine
    answers token ids and no text, which they do not concern. Fields that are not listed are refused. Of the
    constraints one is taken at most.
    """

    max_new_tokens: int | None = 128
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    min_p: float | None = 0.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
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


SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/generate`. Without `return_logprob` all log-probabilities are left out of the answer. With a
    `logprob_start_len` of 0 or more it has those of the input too, from that token on."""

    input_ids: list[int]
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    stream: bool = False
    rid: str | None = None


class SamplingRules(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling of one request. `top_k` 0 means no cut."""

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
        """True where top-p, top-k or min-p take tokens out of the distribution."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def adjusts(self) -> bool:
        """True where penalties or a bias change the logits."""
        return bool(self.logit_bias) or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def rules_of(body: GenerateBody, *, vocabulary: int, context: int) -> SamplingRules:
    """Validates a request against the model. Raises RequestRefused with SGLang's words where it has any."""
    parameters = body.sampling_params or {}
    unknown = sorted(set(parameters) - SAMPLING_FIELDS)
    if unknown:
        raise RequestRefused(f"sampling_params: this engine does not have {', '.join(unknown)}")
    try:
        asked = msgspec.convert(parameters, Sampling)
    except msgspec.ValidationError as error:
        raise RequestRefused(f"sampling_params: {error}") from error
    prompt = len(body.input_ids)
    _check_prompt(body.input_ids, vocabulary=vocabulary, context=context)
    rules = SamplingRules(
        max_new_tokens=context - prompt - 1 if asked.max_new_tokens is None else asked.max_new_tokens,
        greedy=asked.temperature is not None and 0.0 <= asked.temperature < GREEDY_BELOW,
        temperature=1.0 if asked.temperature is None or asked.temperature < GREEDY_BELOW else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=0 if asked.top_k in {None, -1} else asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=asked.sampling_seed,
        logit_bias=_bias_of(asked.logit_bias, vocabulary),
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
        ignore_eos=bool(asked.ignore_eos),
        constraint=_constraint_of(asked),
        top_logprobs=body.top_logprobs_num if body.return_logprob else 0,
    )
    if not -1 <= body.logprob_start_len < prompt:
        raise RequestRefused(f"logprob_start_len must be in [-1, {prompt - 1}], below the input's length.")
    if not 0 <= body.top_logprobs_num <= MOST_TOP_LOGPROBS:
        raise RequestRefused(f"top_logprobs_num must be in [0, {MOST_TOP_LOGPROBS}].")
    _check_ranges(asked, rules)
    if prompt + rules.max_new_tokens > context:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens: "
            f"{prompt} tokens of input and {rules.max_new_tokens} tokens for the completion."
        )
    return rules


def _check_prompt(ids: list[int], *, vocabulary: int, context: int) -> None:
    if not ids:
        raise RequestRefused("input_ids cannot be empty.")
    if len(ids) >= context:
        raise RequestRefused(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise RequestRefused(f"input_ids must be in [0, {vocabulary - 1}].")


def _check_ranges(asked: Sampling, rules: SamplingRules) -> None:
    checks = [
        (asked.temperature is None or (math.isfinite(asked.temperature) and asked.temperature >= 0.0), "temperature"),
        (0.0 < rules.top_p <= 1.0, "top_p"),
        (asked.top_k in {None, -1} or rules.top_k >= 1, "top_k"),
        (0.0 <= rules.min_p <= 1.0, "min_p"),
        (-2.0 <= rules.presence_penalty <= 2.0, "presence_penalty"),
        (-2.0 <= rules.frequency_penalty <= 2.0, "frequency_penalty"),
        (rules.max_new_tokens >= 1, "max_new_tokens"),
        (all(rules.stop), "stop"),
    ]
    for fine, name in checks:
        if not fine:
            raise RequestRefused(f"{name} is out of its range: {getattr(asked, name)!r}.")


def _constraint_of(asked: Sampling) -> Constraint | None:
    given = [(kind, getattr(asked, kind.value)) for kind in ConstraintKind if getattr(asked, kind.value) is not None]
    if len(given) > 1:
        raise RequestRefused(f"Only one of {', '.join(ConstraintKind)} can be set.")
    return Constraint(kind=given[0][0], text=given[0][1]) if given else None


def _bias_of(bias: dict[str, float] | None, vocabulary: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in (bias or {}).items():
        if not key.isdecimal() or int(key) >= vocabulary or not math.isfinite(value):
            raise RequestRefused(f"logit_bias must have keys in [0, {vocabulary - 1}] and finite values, got {key}.")
        pairs.append((int(key), value))
    return tuple(pairs)
