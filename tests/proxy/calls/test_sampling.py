from __future__ import annotations

import pytest

from proxy.calls.call import RequestedSampling
from proxy.calls.sampling import resolve_sampling
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import SamplingParameters
from proxy.errors import ContextLengthExceeded, InvalidRequest
from proxy.settings import RunSettings, SamplingMode, SamplingSettings
from proxy.tokens.template import ChatTemplate


def resolved(
    template: ChatTemplate,
    asked: RequestedSampling,
    mode: SamplingMode = SamplingMode.RESPECT,
    purpose: Purpose = Purpose.TRAIN,
    prompt_tokens: int = 10,
    max_new_tokens: int = 1024,
) -> SamplingParameters:
    run = RunSettings(sampling=SamplingSettings(mode=mode, temperature=0.8), max_new_tokens=max_new_tokens)
    return resolve_sampling(asked, run=run, purpose=purpose, template=template, prompt_tokens=prompt_tokens)


def test_default_sampling_is_the_plain_distribution(template: ChatTemplate) -> None:
    plain = SamplingParameters(max_new_tokens=502, stop_token_ids=template.stop_ids)
    assert resolved(template, RequestedSampling()) == plain


@pytest.mark.parametrize(("asked", "bound", "prompt", "given"), [
    (None, 30, 10, 30),
    (20, 30, 10, 20),
    (32_000, 30, 10, 30),
    (32_000, 4096, 500, 12),
    (None, 4096, 511, 1),
])  # fmt: skip
def test_the_bound_is_the_least(
    template: ChatTemplate, asked: int | None, bound: int, prompt: int, given: int
) -> None:
    wanted = RequestedSampling(max_new_tokens=asked)
    assert resolved(template, wanted, prompt_tokens=prompt, max_new_tokens=bound).max_new_tokens == given


def test_a_prompt_that_fills_the_context_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(ContextLengthExceeded, match="512"):
        resolved(template, RequestedSampling(), prompt_tokens=512)


def test_greedy_is_raised_in_training_only(template: ChatTemplate) -> None:
    greedy = RequestedSampling(temperature=0.0, top_p=0.5)
    raised = resolved(template, greedy, SamplingMode.RAISE_GREEDY)
    assert (raised.temperature, raised.top_p) == (0.8, 0.5)
    assert resolved(template, greedy, SamplingMode.RAISE_GREEDY, Purpose.EVAL).is_greedy
    assert resolved(template, RequestedSampling(temperature=0.3), SamplingMode.RAISE_GREEDY).temperature == 0.3


def test_override_samples_the_plain_distribution_at_the_runs_temperature(template: ChatTemplate) -> None:
    asked = RequestedSampling(
        temperature=0.1, top_p=0.2, top_k=3, min_p=0.1, presence_penalty=1, frequency_penalty=1, seed=4, stop=("x",)
    )
    given = resolved(template, asked, SamplingMode.OVERRIDE)
    assert given == SamplingParameters(
        max_new_tokens=502, temperature=0.8, seed=4, stop=("x",), stop_token_ids=template.stop_ids
    )
    assert resolved(template, asked, SamplingMode.OVERRIDE, Purpose.EVAL).top_k == 3


def test_respect_keeps_the_requested_sampling(template: ChatTemplate) -> None:
    given = resolved(template, RequestedSampling(temperature=0.0, top_k=5, min_p=0.1, frequency_penalty=0.5))
    assert (given.temperature, given.top_k, given.min_p, given.frequency_penalty) == (0.0, 5, 0.1, 0.5)


def test_a_bias_on_no_token_is_refused(template: ChatTemplate) -> None:
    assert resolved(template, RequestedSampling(logit_bias={"5": 1.0})).logit_bias == {"5": 1.0}
    with pytest.raises(InvalidRequest) as caught:
        resolved(template, RequestedSampling(logit_bias={str(template.vocabulary_size): 1.0}))
    assert caught.value.param == "logit_bias"
