from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.common.wire import BodyReader, RequestRefused
from proxy.engines.embedded.sampling import BatchRules, adjust, cut, sample
from proxy.engines.embedded.wire import EmbeddedBody, SamplingRules, rules_of

CPU = torch.device("cpu")
RULES = SamplingRules(
    max_new_tokens=8,
    greedy=False,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=None,
    logit_bias=(),
    stop=(),
    stop_token_ids=frozenset(),
    ignore_eos=False,
)


def rules(**changes: Any) -> SamplingRules:
    return msgspec.structs.replace(RULES, **changes)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(20_000, 1)
    batch = BatchRules([rules(temperature=0.7)] * len(logits), CPU)
    tokens, logprobs, _ = sample(logits, batch, [[]] * len(logits), generator())
    expected = torch.softmax(logits[0] / 0.7, dim=-1)
    seen = torch.bincount(tokens, minlength=4) / len(logits)
    # Five standard deviations of a frequency over 20,000 draws.
    assert seen == pytest.approx(expected.numpy(), abs=5 * (0.25 / 20_000) ** 0.5)
    assert logprobs == pytest.approx(expected.log()[tokens].numpy(), abs=1e-5)


@given(st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(1, 12), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_cut_keeps_the_smallest_most_probable_set(seed: int, top_p: float, top_k: int, min_p: float) -> None:
    logprobs = torch.log_softmax(torch.randn(3, 12, generator=generator(seed)), dim=-1)
    column = torch.ones(3, 1)
    kept = cut(logprobs, column * top_p, column.long() * top_k, column * min_p) > -torch.inf
    for row, keep in zip(logprobs, kept, strict=True):
        order = row.sort(descending=True).indices
        chosen = int(keep.sum())
        assert keep[order[:chosen]].all(), "what is kept is the most probable"
        assert 1 <= chosen <= top_k
        mass = row.exp()[order]
        assert mass[: chosen - 1].sum() < top_p + 1e-6, "without its last token it does not reach p"
        assert (mass[1:chosen] >= min_p * mass[0] - 1e-6).all()
        full = chosen == min(top_k, 12) or mass[:chosen].sum() >= top_p - 1e-6
        assert full or mass[chosen] < min_p * mass[0] + 1e-6, "nothing is cut without a reason"


def test_a_sampled_token_is_always_allowed() -> None:
    logits = torch.randn(512, 40, generator=generator())
    batch = BatchRules([rules(top_k=3)] * 512, CPU)
    tokens, *_ = sample(logits, batch, [[]] * 512, generator())
    assert (logits.topk(3).indices == tokens[:, None]).any(dim=1).all()


def test_rows_follow_their_own_rules() -> None:
    logits = torch.randn(1, 50, generator=generator()).repeat(4, 1)
    batch = BatchRules(
        [rules(greedy=True), rules(temperature=2.0), rules(top_k=1), rules(logit_bias=((7, 100.0),))], CPU
    )
    tokens, logprobs, _ = sample(logits, batch, [[]] * 4, generator())
    assert tokens[0] == tokens[2] == logits[0].argmax()
    assert tokens[3] == 7
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1).max().item(), abs=1e-5)
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits[0] / 2, -1)[tokens[1]].item(), abs=1e-5)
    assert logprobs[3] == pytest.approx(0.0, abs=1e-5)


def test_penalties_count_what_was_generated() -> None:
    batch = BatchRules([rules(presence_penalty=0.5, frequency_penalty=0.25), rules()], CPU)
    changed = adjust(torch.zeros(2, 4), batch, [[1, 1, 3], [1]])
    assert changed.tolist() == [[0.0, -1.0, 0.0, -0.75], [0.0, 0.0, 0.0, 0.0]]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_seeded_draw_depends_on_seed_and_position_alone(seed: int, row: int) -> None:
    logits = torch.zeros(6, 200)
    lone, *_ = sample(logits[:1], BatchRules([rules(seed=seed)], CPU), [[1, 2]], generator(1))
    others = [rules(seed=seed) if index == row else rules() for index in range(6)]
    mixed, *_ = sample(logits, BatchRules(others, CPU), [[1, 2]] * 6, generator(2))
    assert lone[0] == mixed[row]


def test_a_seeded_request_does_not_repeat_itself() -> None:
    batch = BatchRules([rules(seed=3)], CPU)
    logits = torch.zeros(1, 1000)
    draws = {int(sample(logits, batch, [[0] * position], generator())[0]) for position in range(20)}
    assert len(draws) > 15


def test_nulls_are_defaults() -> None:
    parameters = dict.fromkeys(
        ["temperature", "top_p", "top_k", "min_p", "stop", "logit_bias", "sampling_seed", "ignore_eos"], None
    )
    assert read(input_ids=[1], sampling_params=parameters) == rules(max_new_tokens=128)


def test_a_temperature_near_zero_is_greedy() -> None:
    assert read(input_ids=[1], sampling_params={"temperature": 1e-7}) == rules(greedy=True, max_new_tokens=128)


@pytest.mark.parametrize("asked", [{"top_logprobs_num": 21}, {"logprob_start_len": -2}, {"logprob_start_len": 1}])
def test_wrong_requests_for_log_probabilities_are_refused(asked: dict[str, int]) -> None:
    with pytest.raises(RequestRefused, match=next(iter(asked))):
        read(input_ids=[1], return_logprob=True, **asked)


def read(**body: Any) -> SamplingRules:
    found, limit = BodyReader(EmbeddedBody, vocabulary=10, context=200).read(msgspec.json.encode(body))
    return rules_of(found, limit=limit)
