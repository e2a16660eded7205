"""Parse the body of POST /v1/completions. Every error is a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from proxy.calls.bounds import DEFAULT_BOUNDS
from proxy.calls.call import ModelCall
from proxy.dialects.fields import decode_body, unknown_fields
from proxy.dialects.openai_fields import SamplingFields, StreamOptions
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.http.body import validated
from proxy.settings import RequestSettings

# Prompts times `n`. Without a bound a body of a few megabytes could ask for millions of answers.
MOST_ANSWERS = 1024

_DEFAULT_NEW_TOKENS = 16  # the default of OpenAI's API

_PROMPT_FORMS = "prompt must be text, a list of texts, token ids, or a list of lists of token ids"
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
_PROMPT: dict[str, Any] = {
    "anyOf": [{"type": "string", "minLength": 1}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]
}

# The end of msgspec's error messages, such as " - at `$[1][0]`".
_ERROR_PLACE = re.compile(r" - at `\$((?:\[\d+\])*)`$")

TextOf = Callable[[Sequence[int]], str]


class CompletionBody(SamplingFields):
    """The fields of the body. Null counts as absent; other fields are ignored with a warning."""

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
    """Parse a body. `text_of` decodes token ids, for prompts that are echoed.

    Raise InvalidRequest for an invalid field and UnsupportedParameter for a field that cannot be honoured; both name
    the field.
    """
    value = decode_body(raw)
    body = validated(CompletionBody, value)
    n = body.n or 1
    _refuse_unsupported(body, n)
    prompts = _prompts(body.prompt, bounds.max_prompt_ids)
    if len(prompts) * n > MOST_ANSWERS:
        raise InvalidRequest(
            f"a call may ask for at most {MOST_ANSWERS} answers, this one asks for {len(prompts) * n}",
            param="prompt" if len(prompts) > n else "n",
        )
    return ModelCall(
        model=body.model,
        messages=[],
        prompts=prompts,
        echoes=tuple(p if isinstance(p, str) else text_of(p) for p in prompts) if body.echo else (),
        sampling=body.requested(body.max_tokens or _DEFAULT_NEW_TOKENS),
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
        raise InvalidRequest("best_of must be at least n", param="best_of")
    if body.best_of is not None and body.best_of > n:
        # An answer that is generated and dropped would be a turn that no reward can reach.
        raise UnsupportedParameter(
            "best_of above n is not supported: every generated answer is returned", param="best_of"
        )
    if body.suffix:
        raise UnsupportedParameter("suffix is not supported: the model only continues text", param="suffix")
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "echo with logprobs is not supported: log-probabilities of the prompt are not known", param="logprobs"
        )


def _prompts(value: Any, most_ids: int) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(_PROMPT_FORMS, param="prompt")
    # Counted before the conversion, which takes time in proportion to the number of ids.
    count = sum(len(prompt) if isinstance(prompt, list) else 1 for prompt in value)
    if count > most_ids:
        raise InvalidRequest(
            f"prompt has {count} token ids, and at most {most_ids} are accepted (requests.max_prompt_ids)",
            param="prompt",
        )
    try:
        if isinstance(value[0], str):
            return msgspec.convert(value, tuple[str, ...])
        if isinstance(value[0], list):
            return msgspec.convert(value, tuple[tuple[int, ...], ...])
        return (msgspec.convert(value, tuple[int, ...]),)
    except msgspec.ValidationError as error:
        place = _ERROR_PLACE.search(str(error))
        raise InvalidRequest(_PROMPT_FORMS, param=f"prompt{place.group(1)}" if place else "prompt") from error
