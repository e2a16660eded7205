"""Write the body of a `/generate` request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from proxy.contract.turn import SamplingParameters
from proxy.engines.bounds import ReplyBounds
from proxy.engines.grammars import constraint_for
from proxy.engines.protocol import GenerateRequest

# Above these sizes a body takes more than about two milliseconds to write, so a thread writes it and the event loop
# stays free for other calls.
# Token ids that no earlier request has written as JSON.
_LARGE_IDS = 1 << 14
_LARGE_BIASES = 1 << 10
# Characters of a grammar, which is decoded, rewritten and encoded.
_LARGE_CONSTRAINT = 1 << 14
# Tokens between two events of an answer that nobody reads before its end. SGLang sends the first token at once.
_NO_MORE_EVENTS = 1 << 20


async def generate_body(
    request: GenerateRequest,
    *,
    engine_id: str,
    grammar_backend: str | None,
    prefix_key: Callable[[], str | None],
    reports_first_token: bool = False,
) -> bytes:
    """Return the JSON body of a request, which the engine knows as `engine_id`. `prefix_key` separates the prefix
    caches of different weights of the base model; the name of the adapter is added to it.

    With `reports_first_token` the engine reports the first token in an event of its own, also for an answer that is
    not streamed.

    Raises UnsupportedParameter for a constraint that the grammar back end does not enforce, InvalidRequest for a
    malformed one.
    """

    def write() -> tuple[bytes, bytes]:
        sampling = sampling_body(request.sampling, grammar_backend)
        if reports_first_token and not request.stream:
            sampling["stream_interval"] = _NO_MORE_EVENTS
        return request.input_ids.json, msgspec.json.encode(sampling)

    ids, sampling = await asyncio.to_thread(write) if _is_large(request) else write()
    body: dict[str, Any] = {
        "rid": engine_id,
        "input_ids": msgspec.Raw(ids),
        "sampling_params": msgspec.Raw(sampling),
        "return_logprob": True,
        "stream": request.stream or reports_first_token,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    # Read last: the weights may change while the thread writes.
    key = prefix_key()
    if request.adapter is not None:
        body["lora_path"] = request.adapter
        key = f"{key or ''}/{request.adapter}"
    if key:
        body["extra_key"] = key
    return msgspec.json.encode(body)


def sampling_body(sampling: SamplingParameters, grammar_backend: str | None = None) -> dict[str, Any]:
    """Return SGLang's `sampling_params`. `skip_special_tokens` and `no_stop_trim` make SGLang's text match its ids.

    Raises UnsupportedParameter for a constraint that the grammar back end does not enforce.
    """
    body: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    optional: dict[str, tuple[Any, Any]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
        "min_p": (sampling.min_p, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "sampling_seed": (sampling.seed, None),
        "stop": (sampling.stop, ()),
        "stop_token_ids": (sampling.stop_token_ids, ()),
        "logit_bias": (sampling.logit_bias, None),
    }
    body |= {name: value for name, (value, default) in optional.items() if value != default}
    if sampling.constraint is not None:
        constraint = constraint_for(sampling.constraint, grammar_backend)
        body[constraint.kind.value] = constraint.text
    return body


def engine_request_id(request_id: str) -> str:
    """Return the id of a request in the engine. SGLang aborts every request whose id starts with the given one; with
    an end mark no id is the start of another."""
    return f"{request_id}/"


def bounds_of(request: GenerateRequest) -> ReplyBounds:
    """Return the limits that an honest reply to the request stays within."""
    bounds = ReplyBounds(
        max_new_tokens=request.sampling.max_new_tokens,
        prompt_tokens=len(request.input_ids),
        per_token=1 + request.top_logprobs,
    )
    if request.vocabulary_size is None:
        return bounds
    return msgspec.structs.replace(bounds, vocabulary_size=request.vocabulary_size)


def _is_large(request: GenerateRequest) -> bool:
    sampling = request.sampling
    return (
        request.input_ids.unwritten > _LARGE_IDS
        or len(sampling.logit_bias or ()) > _LARGE_BIASES
        or (sampling.constraint is not None and len(sampling.constraint.text) > _LARGE_CONSTRAINT)
    )
