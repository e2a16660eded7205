"""Outcomes better than their baseline become more likely, for every preset that learns from rewards.

A batch passes through the parts of a step: baselines, advantages, packing, and the preset's loss. The test examines
the loss's gradient by each token's log-probability. The policy is the one that sampled, as in a first optimiser step.
Baselines are computed here a second time, from their definition.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.contract.trajectory import Trajectory
from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import Advantages, assign, continued
from trainer.algorithm.gae import Discounts, RewardTree, batch_advantages, scaled
from trainer.algorithm.losses import PolicyLossInputs, policy_loss
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS
from trainer.algorithm.running import SESSION, Observation, RunningMeans
from trainer.algorithm.whitening import whitened
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import Baseline, BatchSettings, Scale

LEARNING = [name for name, each in PRESETS.items() if each.learns_from_rewards]
INVARIANT = [name for name in LEARNING if PRESETS[name].scale is not Scale.NONE and not PRESETS[name].has_critic]
TURNS = 3


@dataclass(frozen=True)
class Sample:
    """A batch of chains of turns, with the rewards that the run saw before at each place."""

    session: tuple[float | None, ...]
    turns: tuple[tuple[float | None, ...], ...]
    groups: tuple[int, ...]
    seen: Mapping[int, tuple[float, ...]]

    def moved(self, factor: float, shift: float) -> Sample:
        """Return the sample in another unit and with another zero; turn rewards keep their zero, because their shifts
        would add up."""
        return Sample(
            session=tuple(None if each is None else factor * (each + shift) for each in self.session),
            turns=tuple(tuple(None if each is None else factor * each for each in of) for of in self.turns),
            groups=self.groups,
            seen={
                place: tuple(factor * (each + (shift if place == SESSION else 0.0)) for each in values)
                for place, values in self.seen.items()
            },
        )

    @property
    def rewarded(self) -> list[int]:
        """Return the trajectories that have any reward."""
        return [
            index
            for index, (session, turns) in enumerate(zip(self.session, self.turns, strict=True))
            if any(each is not None for each in (session, *turns))
        ]

    @property
    def members(self) -> list[Trajectory]:
        found = []
        for number, (session, turns) in enumerate(zip(self.session, self.turns, strict=True)):
            chain = []
            for at, reward in enumerate(turns):
                node = turn([4, 5], prompt=[1 + number % 40], parent=at - 1 if at else None, prefix=3 * at)
                chain.append(msgspec.structs.replace(node, reward=reward))
            found.append(trajectory(*chain, reward=session))
        return found

    @property
    def means(self) -> RunningMeans:
        history = [Observation(None, place, value) for place, values in self.seen.items() for value in values]
        return RunningMeans.fresh(0.9).after(history)


points = st.integers(-3, 3).map(float)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Groups of one, two and eight, mixed; session rewards, turn rewards, or both."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=3))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    kinds = draw(st.sampled_from(["session", "turns", "both"]))
    turns: list[tuple[float | None, ...]] = []
    for _ in groups:
        count = draw(st.integers(1, TURNS))
        turns.append(tuple(None if kinds == "session" else draw(st.none() | points) for _ in range(count)))
    return Sample(
        session=tuple(None if kinds == "turns" else draw(points) for _ in groups),
        turns=tuple(turns),
        groups=tuple(groups),
        seen={place: tuple(draw(st.lists(points, min_size=1, max_size=4))) for place in range(SESSION, TURNS)},
    )


def returns(rewards: Sequence[float | None], discount: float) -> list[float | None]:
    found: list[float | None] = []
    for start in range(len(rewards)):
        later = [(at, each) for at, each in enumerate(rewards[start:]) if each is not None]
        found.append(sum(discount**at * each for at, each in later) if later else None)
    return found


def expected(sample: Sample, algorithm: Algorithm) -> list[list[float | None]]:
    """Return each turn's distance from its baselines, or None if its two parts have opposite signs and different
    scales."""
    discount = algorithm.turn_discount
    places = [
        {SESSION: session} | dict(enumerate(returns(turns, discount)))
        for session, turns in zip(sample.session, sample.turns, strict=True)
    ]

    def distance(index: int, place: int) -> tuple[float, bool]:
        """Return the distance from the baseline, and whether the baseline is the running mean."""
        value = places[index].get(place)
        if value is None:
            return 0.0, False
        if algorithm.has_critic:
            return value, False
        cohort = [
            other
            for number, each in enumerate(places)
            if algorithm.baseline is Baseline.BATCH_MEAN or sample.groups[number] == sample.groups[index]
            if (other := each.get(place)) is not None
        ]
        alone = len(cohort) == 1
        if algorithm.baseline is Baseline.LEAVE_ONE_OUT and not alone:
            cohort.remove(value)
        return value - statistics.fmean(sample.seen[place] if alone else cohort), alone

    whitened_ = algorithm.whitens and len(sample.rewarded) > 1  # all rewards then have one scale, of the tokens
    found: list[list[float | None]] = []
    for index, turns in enumerate(sample.turns):
        of_session, lone = distance(index, SESSION)
        row: list[float | None] = []
        for at in range(len(turns)):
            weighted = of_session * discount ** (len(turns) - 1 - at)
            own, own_lone = distance(index, at)
            row.append(None if not whitened_ and lone != own_lone and weighted * own < 0 else weighted + own)
        found.append(row)
    if whitened_:  # Every turn has the same number of tokens.
        mean = statistics.fmean([each or 0.0 for index in sample.rewarded for each in found[index]])
        for index in sample.rewarded:
            found[index] = [(each or 0.0) - mean for each in found[index]]
    return found


Moves = dict[tuple[int, int], list[float]]


def step(sample: Sample, algorithm: Algorithm) -> tuple[Advantages, Moves]:
    """Return advantages and, by trajectory and turn, the gradients of −loss by the log-probabilities of the
    tokens."""
    members = sample.members
    advantages = assign(members, sample.groups, algorithm, sample.means)
    batch = Batch(trajectories=tuple(members), groups=sample.groups, base_version=0)
    if algorithm.whitens and len(sample.rewarded) > 1:
        advantages = dataclasses.replace(advantages, turns=over_tokens(advantages.turns, sample.rewarded))
    parts = mini_batches(batch, advantages.turns, linearise(members), BatchSettings(), algorithm)
    moves: Moves = {}
    for part in parts:
        for micro in part.micro_batches:
            values_N = credited(micro, advantages, members, algorithm) if algorithm.has_critic else micro.advantages_N
            logprobs_N = micro.behaviour_N.double().requires_grad_()
            inputs = PolicyLossInputs(
                logprobs_N=logprobs_N,
                proximal_N=micro.behaviour_N.double(),
                behaviour_N=micro.behaviour_N.double(),
                advantages_N=values_N.double(),
                answer_N=micro.answer_N,
                share_N=torch.full_like(logprobs_N, 1 / part.denominator).detach(),
                altered_N=micro.altered_N,
            )
            torch.autograd.backward(policy_loss(inputs, algorithm.objective).loss)
            assert logprobs_N.grad is not None
            for index, number, slope in zip(
                micro.trajectory_N.tolist(), micro.turn_N.tolist(), logprobs_N.grad.tolist(), strict=True
            ):
                moves.setdefault((index, number), []).append(-slope)
    return advantages, moves


def over_tokens(turns: Sequence[Sequence[float]], rewarded: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return the advantages normalised over the tokens of rewarded trajectories; every turn has the same number of
    tokens."""
    counted_N = torch.tensor([index in rewarded for index, row in enumerate(turns) for _ in row])
    whitened_N = whitened(torch.tensor([each for row in turns for each in row], dtype=torch.float64), counted_N)
    values = iter(whitened_N.tolist())
    return tuple(tuple(next(values) for _ in row) for row in turns)


def credited(
    micro: MicroBatch, advantages: Advantages, members: Sequence[Trajectory], algorithm: Algorithm
) -> torch.Tensor:
    """Return the advantages of an untrained critic."""
    trees = {
        index: RewardTree(parents=tuple(continued(members[index].turns)), rewards=advantages.turns[index])
        for index in set(micro.trajectory_N.tolist())
    }
    nothing_N = torch.zeros(micro.targets_N.numel())
    discounts = Discounts(
        discount=algorithm.discount, gae_lambda=algorithm.gae_lambda, turn_discount=algorithm.turn_discount
    )
    found_N = batch_advantages(micro.trajectory_N, micro.turn_N, nothing_N, nothing_N, trees, discounts)
    return scaled(found_N, algorithm.scale)


@pytest.mark.parametrize("preset", LEARNING)
@settings(max_examples=25, deadline=None)
@given(
    sample=samples(),
    factor=st.sampled_from([1e-4, 1.0, 1e4]),
    shift=st.integers(-100, 100),
    discount=st.sampled_from([1.0, 0.5]),
)
def test_an_outcome_above_its_baseline_becomes_more_likely(
    preset: str, sample: Sample, factor: float, shift: int, discount: float
) -> None:
    algorithm = dataclasses.replace(PRESETS[preset], turn_discount=discount)
    moved = sample.moved(factor, float(shift))
    _, moves = step(moved, algorithm)
    for index, row in enumerate(expected(moved, algorithm)):
        for at, distance in enumerate(row):
            if distance is None or abs(distance) < 1e-9 * factor * (100 + abs(shift)):
                continue
            for move in moves[index, at]:
                assert (move > 0, move < 0) == (distance > 0, distance < 0), (index, at, distance, move)


@pytest.mark.parametrize("preset", [name for name in LEARNING if not PRESETS[name].has_critic])
@settings(max_examples=12, deadline=None)
@given(
    value=st.floats(-100, 100),
    sizes=st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=3),
    turns=st.booleans(),
    discount=st.sampled_from([1.0, 0.9, 1 / 3]),
)
def test_equal_rewards_give_no_gradient(
    preset: str, value: float, sizes: list[int], turns: bool, discount: float
) -> None:
    algorithm = dataclasses.replace(PRESETS[preset], turn_discount=discount)
    groups = tuple(group for group, size in enumerate(sizes) for _ in range(size))
    chain = (value, None, value) if turns else (None, None)
    sample = Sample(
        session=(value,) * len(groups),
        turns=(chain,) * len(groups),
        groups=groups,
        seen={SESSION: (value,) * 3}
        | {place: (each,) * 3 for place, each in enumerate(returns(chain, discount)) if each is not None},
    )
    advantages, moves = step(sample, algorithm)
    assert advantages.all_zero
    assert {move for each in moves.values() for move in each} <= {0.0}


def in_both_units(
    preset: str, sample: Sample, factor: float, shift: int
) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the advantages of each trajectory's turns, for the original rewards and for another unit and zero."""
    plain, _ = step(sample, PRESETS[preset])
    other, _ = step(sample.moved(factor, float(shift)), PRESETS[preset])
    return zip(plain.turns, other.turns, strict=True)


@pytest.mark.parametrize("preset", INVARIANT)
@settings(max_examples=12, deadline=None)
@given(sample=samples(), factor=st.floats(1e-6, 1e6), shift=st.integers(-100, 100))
def test_another_unit_and_another_zero_of_rewards_change_nothing(
    preset: str, sample: Sample, factor: float, shift: int
) -> None:
    for mine, theirs in in_both_units(preset, sample, factor, shift):
        assert theirs == pytest.approx(mine, abs=1e-9)


@pytest.mark.parametrize("preset", ["dr_grpo", "rloo"])
@settings(max_examples=12, deadline=None)
@given(sample=samples(), factor=st.floats(1e-6, 1e6), shift=st.integers(-100, 100))
def test_presets_without_a_scale_use_the_unit_of_the_rewards(
    preset: str, sample: Sample, factor: float, shift: int
) -> None:
    for mine, theirs in in_both_units(preset, sample, factor, shift):
        assert theirs == pytest.approx([factor * each for each in mine], abs=1e-9 * factor)
