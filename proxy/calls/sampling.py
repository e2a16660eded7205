"""From the sampling that a client asks for to the one that the engine is given."""

from __future__ import annotations

import msgspec

from proxy.calls.call import RequestedSampling
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import SamplingParameters
from proxy.errors import ContextLengthExceeded, InvalidRequest
from proxy.settings import RunSettings, SamplingMode
from proxy.tokens.template import ChatTemplate

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")

_HALF = 2**63
"""Seeds are signed and of 64 bits."""


def resolve_sampling(
    requested: RequestedSampling,
    *,
    run: RunSettings,
    purpose: Purpose,
    template: ChatTemplate,
    prompt_tokens: int,
    prompt_param: str = "messages",
    call_end: str | None = None,
) -> SamplingParameters:
    """What is not asked for is OpenAI's default. The bound on new tokens is the least of the client's, the run's and
    the context's. In training sessions the run's mode applies: `raise_greedy` samples where greedy was asked for,
    `override` samples from the unaltered distribution at the run's temperature. `call_end` ends the answer with its
    first tool call; `prompt_param` is where the prompt stands in the request.

    Raises ContextLengthExceeded, in the words of Anthropic's API, by which Claude Code knows to compact;
    InvalidRequest for a bias on no token.
    """
    room = template.context_length - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {template.context_length} maximum",
            param=prompt_param,
        )
    for token in requested.logit_bias or ():
        if int(token) >= template.vocabulary_size:
            raise InvalidRequest(f"there is no token {token}", param="logit_bias")
    plain = SamplingParameters(
        max_new_tokens=min(requested.max_new_tokens or run.max_new_tokens, run.max_new_tokens, room),
        temperature=_or(requested.temperature, 1.0),
        top_p=_or(requested.top_p, 1.0),
        top_k=requested.top_k or -1,
        min_p=_or(requested.min_p, 0.0),
        presence_penalty=_or(requested.presence_penalty, 0.0),
        frequency_penalty=_or(requested.frequency_penalty, 0.0),
        seed=requested.seed,
        stop=requested.stop if call_end is None else (*requested.stop, call_end),
        stop_token_ids=template.stop_ids,
        logit_bias=requested.logit_bias,
    )
    return _with_mode(plain, run) if purpose is Purpose.TRAIN else plain


def changes(requested: RequestedSampling, given: SamplingParameters, run: RunSettings) -> list[str]:
    """Name what the engine is given otherwise than the client asked, with the setting that is the reason. Defaults
    for what the client left out are no changes."""
    told = []
    if requested.max_new_tokens is not None and given.max_new_tokens < requested.max_new_tokens:
        reason = "run.max_new_tokens" if given.max_new_tokens == run.max_new_tokens else "the context's length"
        told.append(f"at most {given.max_new_tokens} new tokens instead of {requested.max_new_tokens}: {reason}")
    for name in _NUMBERS:
        asked, got = getattr(requested, name), getattr(given, name)
        if asked is not None and asked != got:
            told.append(f"{name} is {got:g} instead of {asked:g}: run.sampling.mode is {run.sampling.mode}")
    return told


def for_choice(sampling: SamplingParameters, choice: int) -> SamplingParameters:
    """The sampling of one choice of several: with one seed all of them would be the same answer."""
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice + _HALF) % (2 * _HALF) - _HALF)


def _with_mode(asked: SamplingParameters, run: RunSettings) -> SamplingParameters:
    mode, temperature = run.sampling.mode, run.sampling.temperature
    if mode is SamplingMode.OVERRIDE:
        return SamplingParameters(
            max_new_tokens=asked.max_new_tokens,
            temperature=temperature,
            seed=asked.seed,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            logit_bias=asked.logit_bias,
        )
    if mode is SamplingMode.RAISE_GREEDY and asked.is_greedy:
        return msgspec.structs.replace(asked, temperature=temperature)
    return asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
