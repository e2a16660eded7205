"""The body of POST /v1/completions, checked: every fault is a 400 that names its field."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS
from proxy.calls.call import ModelCall
from proxy.dialects.chat.request import StreamOptions
from proxy.dialects.fields import decode_body, unknown_fields
from proxy.dialects.sampling_fields import SamplingFields
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

MOST_ANSWERS = 1024
"""To one call: prompts times `n`."""

_DEFAULT_TOKENS = 16
"""OpenAI's."""

_FORMS = "prompt is text, a list of texts, token ids, or a list of lists of token ids"
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_PROMPT: dict[str, Any] = {
    "anyOf": [{"type": "string", "minLength": 1}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]
}
_BROKEN_AT = re.compile(r" - at `\$((?:\[\d+\])*)`$")

TextOf = Callable[[Sequence[int]], str]


class CompletionBody(SamplingFields):
    """Explicit null is the same as absent; fields that are not named here are ignored with a warning."""

    model: str
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    n: int | None = Field(default=None, ge=1, le=128)
    best_of: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def parse_completion(raw: bytes, text_of: TextOf, *, bounds: RequestSettings = DEFAULT_BOUNDS) -> ModelCall:
    """`text_of` writes token ids. Raises InvalidRequest with `param`, UnsupportedParameter for what is understood and
    cannot be honoured."""
    value = decode_body(raw)
    body = validated(CompletionBody, value)
    n = body.n or 1
    _refuse_unsupported(body, n)
    prompts = _prompts(body.prompt, bounds.max_prompt_ids)
    if len(prompts) * n > MOST_ANSWERS:
        raise InvalidRequest(
            f"a call has at most {MOST_ANSWERS} answers, these are {len(prompts) * n}",
            param="prompt" if len(prompts) > n else "n",
        )
    return ModelCall(
        model=body.model,
        messages=[],
        prompts=prompts,
        echoes=tuple(p if isinstance(p, str) else text_of(p) for p in prompts) if body.echo else (),
        sampling=body.requested(body.max_tokens or _DEFAULT_TOKENS),
        n=n,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        body={key: item for key, item in value.items() if key != "prompt"},
        warnings=tuple(unknown_fields(value, CompletionBody)),
    )


def _refuse_unsupported(body: CompletionBody, n: int) -> None:
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest("best_of is at least n", param="best_of")
    if body.best_of is not None and body.best_of > n:
        raise UnsupportedParameter("every answer is given: best_of is n, or nothing", param="best_of")
    if body.suffix:
        raise UnsupportedParameter("an answer cannot be fitted before a suffix", param="suffix")
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "the log-probabilities of a prompt are not known: logprobs or echo", param="logprobs"
        )


def _prompts(value: Any, most_ids: int) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(_FORMS, param="prompt")
    count = sum(len(prompt) if isinstance(prompt, list) else 1 for prompt in value)
    if count > most_ids:
        raise InvalidRequest(
            f"prompt: {count} token ids are sent, and at most {most_ids} are taken (requests.max_prompt_ids)",
            param="prompt",
        )
    try:
        if isinstance(value[0], str):
            return msgspec.convert(value, tuple[str, ...])
        if isinstance(value[0], list):
            return msgspec.convert(value, tuple[tuple[int, ...], ...])
        return (msgspec.convert(value, tuple[int, ...]),)
    except msgspec.ValidationError as error:
        found = _BROKEN_AT.search(str(error))
        raise InvalidRequest(_FORMS, param=f"prompt{found.group(1)}" if found else "prompt") from error
