"""Resolve the sampling that a client asks for into the sampling that the engine gets."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from proxy.calls.call import RequestedSampling
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import SamplingParameters
from proxy.errors import ContextLengthExceeded, InvalidRequest
from proxy.settings import RunSettings, SamplingMode
from proxy.tokens.template import ChatTemplate

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
_numbers_of = attrgetter(*_NUMBERS)

# Seeds are signed 64-bit integers.
_HALF = 2**63


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
    """Return the sampling of one prompt; OpenAI's defaults apply where the client asks for nothing.

    The bound on new tokens is the least of the client's, the run's and the context's. In training sessions the run's
    mode applies: `raise_greedy` samples where the client asked for greedy decoding, `override` samples from the
    unaltered distribution at the run's temperature. `call_end` is the text that ends the answer with its first tool
    call; `prompt_param` names the prompt's place in the request.

    Raise ContextLengthExceeded, in the words of Anthropic's API, by which Claude Code knows that it must compact, and
    InvalidRequest for a bias on a token that does not exist.
    """
    room = template.context_length - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {template.context_length} maximum",
            param=prompt_param,
        )
    for token in requested.logit_bias or ():  # engines fail on these in the middle of a batch
        if int(token) >= template.vocabulary_size:
            raise InvalidRequest(f"there is no token {token}", param="logit_bias")
    plain = SamplingParameters(
        max_new_tokens=min(requested.max_new_tokens or run.max_new_tokens, run.max_new_tokens, room),
        temperature=1.0 if requested.temperature is None else requested.temperature,
        top_p=1.0 if requested.top_p is None else requested.top_p,
        top_k=requested.top_k or -1,
        min_p=0.0 if requested.min_p is None else requested.min_p,
        presence_penalty=0.0 if requested.presence_penalty is None else requested.presence_penalty,
        frequency_penalty=0.0 if requested.frequency_penalty is None else requested.frequency_penalty,
        seed=requested.seed,
        stop=requested.stop if call_end is None else (*requested.stop, call_end),
        stop_token_ids=template.stop_ids,
        logit_bias=requested.logit_bias,
    )
    return _with_mode(plain, run) if purpose is Purpose.TRAIN else plain


def changes(requested: RequestedSampling, given: SamplingParameters, run: RunSettings) -> list[str]:
    """Describe every parameter that differs from what the client asked for, with the setting that is the reason.

    Defaults for parameters that the client left out are no changes.
    """
    changed = []
    if requested.max_new_tokens is not None and given.max_new_tokens < requested.max_new_tokens:
        reason = "run.max_new_tokens" if given.max_new_tokens == run.max_new_tokens else "the context's length"
        changed.append(f"at most {given.max_new_tokens} new tokens instead of {requested.max_new_tokens}: {reason}")
    for name, asked, got in zip(_NUMBERS, _numbers_of(requested), _numbers_of(given), strict=True):
        if asked is not None and asked != got:
            changed.append(f"{name} is {got:g} instead of {asked:g}: run.sampling.mode is {run.sampling.mode}")
    return changed


def for_choice(sampling: SamplingParameters, choice: int) -> SamplingParameters:
    """Return the sampling of one choice of several: with one seed, all choices would be the same answer."""
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice + _HALF) % (2 * _HALF) - _HALF)


def _with_mode(asked: SamplingParameters, run: RunSettings) -> SamplingParameters:
    mode, temperature = run.sampling.mode, run.sampling.temperature
    if mode is SamplingMode.OVERRIDE:
        # Penalties, top-p and the like are left out: they would change the distribution that is trained.
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
