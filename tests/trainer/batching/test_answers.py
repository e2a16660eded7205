"""Answers that were cut or filtered: which tokens are trained, and where their rewards count."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.claim import ClaimedBatch, MaskedTurn, SkipReason
from proxy.contract.identifiers import ClaimId
from proxy.contract.trajectory import Purpose, Trajectory, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, TurnPlace, TurnState
from proxy.lifecycle.outcomes import TurnFacts, untrained_turns
from tests.trainer.tiny import (
    GRPO,
    VOCABULARY,
    cut,
    group_of,
    learner_of,
    load_tiny,
    save_tiny_model,
    trajectory,
    turn,
)
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS
from trainer.algorithm.running import SESSION, Observation, RunningMeans
from trainer.batching.preparation import Prepared, prepare
from trainer.batching.sequences import linearise
from trainer.config import (
    BatchSettings,
    Denominator,
    FilterAction,
    FilterSettings,
    OptimizerSettings,
    Packing,
    Proximal,
    Truncated,
    TruncatedSampling,
)
from trainer.observe.audits import audit_skipped

MEANS = RunningMeans.fresh(0.9).after([Observation(None, SESSION, 0.25), Observation(None, 0, 0.5)])
PARTS = BatchSettings(packing=Packing.PADDED)


def prepared(members: Sequence[Trajectory], algorithm: Algorithm = GRPO, **parts: object) -> Prepared:
    claimed = ClaimedBatch(
        claim_id=ClaimId("claim"), lease_expires_at=0.0, base_version=0, groups=(group_of(members),)
    )
    algorithm = dataclasses.replace(algorithm, **parts)  # type: ignore[arg-type]
    return prepare(claimed, 0, PARTS, algorithm, MEANS, VOCABULARY)


def trained_turns(found: Prepared) -> set[tuple[str, int]]:
    sequences = linearise(found.batch.trajectories)
    return {
        (found.batch.trajectories[sequence.trajectory].session_id, span.turn)
        for sequence in sequences
        for span in sequence.spans
    }


def advantages_by_turn(found: Prepared) -> dict[tuple[str, int], float]:
    return {
        (each.session_id, number): value
        for each, values in zip(found.batch.trajectories, found.advantages.turns, strict=True)
        for number, value in enumerate(values)
    }


@st.composite
def groups(draw: st.DrawFn) -> list[Trajectory]:
    """Sessions of chains of turns in which any answer may be cut."""
    members = []
    for _ in range(draw(st.integers(1, 5))):
        turns: list[TrajectoryTurn] = []
        length = 0
        for number in range(draw(st.integers(1, 3))):
            reward = draw(st.none() | st.floats(-2, 2))
            size = draw(st.integers(1, 4))
            answer = turn(
                range(size), parent=number - 1 if number else None, prefix=length, prompt=(1, 2), reward=reward
            )
            length += 2 + size
            turns.append(draw(st.sampled_from([answer, answer, cut(answer), cut(answer, left=True)])))
        members.append(trajectory(*turns, reward=draw(st.floats(-2, 2)), group="grp"))
    return members


@given(groups(), st.sampled_from(sorted(PRESETS)))
def test_a_masked_answer_is_context_and_the_others_keep_their_advantages(
    members: list[Trajectory], preset: str
) -> None:
    whole = prepared(members, PRESETS[preset], truncated=Truncated.TRAIN, fill=False)
    masked = prepared(members, PRESETS[preset], truncated=Truncated.MASK, fill=False)
    uncut = {
        (member.session_id, number)
        for member in members
        for number, answer in enumerate(member.turns)
        if answer.cut is None
    }
    assert trained_turns(masked) == uncut
    every = advantages_by_turn(whole)
    assert all(advantages_by_turn(masked)[key] == every[key] for key in uncut)
    assert masked.advantages.means == whole.advantages.means
    assert all(
        ids.ids in {each.ids[: len(ids.ids)] for each in linearise(whole.batch.trajectories)}
        for ids in linearise(masked.batch.trajectories)
    )
    emptied = {member.session_id for member in members} - {session for session, _ in uncut}
    assert {(each.session_id, reason) for each, reason in masked.dropped} == {
        (session, SkipReason.TRUNCATED) for session in emptied
    }


def test_answers_from_a_cut_distribution_are_masked_with_the_reason_by_default() -> None:
    drawn = LogprobConvention.UNTRUNCATED
    both = trajectory(turn([1, 2]), turn([3], parent=0, prefix=5, convention=drawn), reward=1.0, group="grp")
    only = trajectory(turn([4], convention=drawn), reward=0.0, group="grp")
    whole = trajectory(turn([5], convention=LogprobConvention.ADJUSTED), reward=0.5, group="grp")
    found = prepared([both, only, whole], PRESETS["grpo"])
    assert trained_turns(found) == {(both.session_id, 0), (whole.session_id, 0)}
    assert found.dropped == ((only, SkipReason.SAMPLING),)
    assert found.judged.masked[both.session_id] == (MaskedTurn(turn_id=both.turns[1].id, reason="sampling"),)
    assert found.judged.metrics()["masked_sampling"] == 2.0
    trained = prepared([both, only, whole], PRESETS["grpo"], truncated_sampling=TruncatedSampling.TRAIN)
    assert len(trained_turns(trained)) == 4
    assert trained.advantages.turns[0][0] == found.advantages.turns[0][0], "rewards are compared all the same"


@given(groups())
def test_dropped_trajectories_are_in_no_baseline(members: list[Trajectory]) -> None:
    found = prepared(members, truncated=Truncated.DROP)
    whole = [member for member in members if all(answer.cut is None for answer in member.turns)]
    assert {each.session_id for each, _ in found.dropped} == {each.session_id for each in members} - {
        each.session_id for each in whole
    }
    if whole:
        alone = prepared(whole, truncated=Truncated.TRAIN, fill=False)
        assert (found.batch, found.advantages) == (alone.batch, alone.advantages)
    assert found.advantages.all_zero or whole


@given(groups())
def test_with_zero_reward_the_baseline_uses_zero_and_the_report_the_given_reward(members: list[Trajectory]) -> None:
    found = prepared(members, truncated=Truncated.ZERO_REWARD)
    zeroed = [
        msgspec.structs.replace(
            member,
            reward=0.0,
            turns=tuple(
                msgspec.structs.replace(answer, reward=0.0) if answer.cut and answer.reward is not None else answer
                for answer in member.turns
            ),
        )
        if any(answer.cut for answer in member.turns)
        else member
        for member in members
    ]
    assert found.advantages == prepared(zeroed, truncated=Truncated.TRAIN).advantages
    assert found.batch.trajectories == tuple(members)
    assert not found.judged.masked


def test_answers_are_counted_with_their_reasons() -> None:
    loop = turn([7, 8] * 6, parent=0, prefix=5, prompt=(9,))
    first = trajectory(cut(turn([4, 5])), loop, reward=1.0, group="grp")
    second = trajectory(cut(turn([4, 5]), left=True), turn([3, 9], parent=0, prefix=5, prompt=()), reward=0.0)
    greedy = trajectory(turn([4], reward=None), cut(turn([6], temperature=0.0)), reward=0.0, group="grp")
    found = prepared([first, second, greedy], filters=FilterSettings(repeated_share=0.5, repeated_ngram=2))
    assert found.judged.masked == {
        first.session_id: (
            MaskedTurn(turn_id=first.turns[0].id, reason="length"),
            MaskedTurn(turn_id=first.turns[1].id, reason="repetition"),
        ),
        second.session_id: (MaskedTurn(turn_id=second.turns[0].id, reason="interrupted"),),
    }
    assert [(each.session_id, reason) for each, reason in found.dropped] == [
        (first.session_id, SkipReason.REPETITION)
    ]
    assert found.judged.metrics() == {
        "answers": 5.0,
        "cut_answer_share": 2 / 5,
        "masked_length": 1.0,
        "masked_interrupted": 1.0,
        "masked_sampling": 0.0,
        "masked_repetition": 1.0,
        "masked_gibberish": 0.0,
    }
    (audit,) = found.explained([audit_skipped(*found.dropped[0])])
    assert (audit.skipped, [each.reason for each in audit.masked]) == ("repetition", ["length", "repetition"])


def test_a_filter_may_drop_while_cut_answers_are_masked() -> None:
    filters = FilterSettings(gibberish_logprob=-5.0, action=FilterAction.DROP)
    gibberish = trajectory(cut(turn([1, 2])), turn([3, 4], logprobs=[-9.0, -9.0]), reward=1.0, group="grp")
    other = trajectory(cut(turn([1, 2])), turn([3, 4], reward=1.0), reward=0.0, group="grp")
    found = prepared([gibberish, other], filters=filters)
    assert [(each.session_id, reason) for each, reason in found.dropped] == [
        (gibberish.session_id, SkipReason.GIBBERISH)
    ]
    assert trained_turns(found) == {(other.session_id, 1)}


def test_only_the_superseded_choice_is_masked() -> None:
    """The session did not continue from it, so its end is not evidence about the session."""
    left_behind = msgspec.structs.replace(cut(turn([4, 5], reward=0.5)), superseded=True)
    members = [trajectory(left_behind, turn([6, 7]), reward=reward, group="grp") for reward in (0.0, 1.0)]
    dropping = prepared(members, truncated=Truncated.DROP)
    assert trained_turns(dropping) == {(member.session_id, 1) for member in members}
    assert all(len(dropping.judged.masked[member.session_id]) == 1 for member in members)
    zeroed = prepared(members, truncated=Truncated.ZERO_REWARD).judged.compared
    assert [each.reward for each in zeroed] == [0.0, 1.0]
    assert [each.turns[0].reward for each in zeroed] == [0.0, 0.0]


def test_a_superseded_choice_is_named_with_its_reason() -> None:
    choices = [
        turn([6], superseded=True),
        turn([7], superseded=True, reward=1.0),
        turn([8], reward=0.0),
        turn([9], superseded=True, trainable=False),
    ]
    member = trajectory(*choices, turn([9], parent=2, prefix=4, prompt=[9]), reward=1.0)
    found = prepared([member, trajectory(turn([4]), reward=0.0)])
    assert found.judged.masked == {member.session_id: (MaskedTurn(turn_id=choices[0].id, reason="superseded"),)}
    clauses = untrained_turns(
        [TurnFacts(place=TurnPlace(choices[0].id, None, 0, 3, TurnState.COMPLETE), is_greedy=False)],
        Purpose.TRAIN,
        {choices[0].id: "superseded"},
    )
    assert "another answer to this prompt" in clauses[choices[0].id]


def test_untrained_turns_give_no_signal() -> None:
    """Turn rewards of greedy and of cut answers do not cause a step."""
    for silent in (turn([4], temperature=0.0, reward=1.0), cut(turn([4], reward=1.0))):
        found = prepared([trajectory(silent, turn([5]), reward=0.5, group="grp") for _ in range(2)])
        assert len(found.batch.trajectories) == 2
        assert found.advantages.all_zero


def test_a_turn_of_an_older_proxy_is_trained() -> None:
    """An older proxy does not report how an answer ended."""
    found = prepared([trajectory(turn([4, 5]), reward=reward, group="grp") for reward in (0.0, 1.0)])
    assert (len(found.batch.trajectories), found.judged.cut) == (2, 0)


@pytest.mark.parametrize("denominator", list(Denominator))
def test_masked_tokens_are_in_no_denominator(denominator: Denominator, tmp_path: Path) -> None:
    """At the first step every ratio is 1. The behaviour policy is so different that all weights are at their cap, so
    the loss is −cap · Σ A · share over the tokens of whole answers."""
    save_tiny_model(tmp_path)
    algorithm = dataclasses.replace(
        GRPO,
        denominator=denominator,
        constant_tokens=10,
        importance_cap=2.0,
        proximal=Proximal.RECOMPUTE,
        mini_batches=1,
    )
    lengths = [[2, 1], [3, 2], [2, 3]]
    ends = [[False, False], [True, False], [True, True]]
    rewards = [1.0, 0.25, 0.0]
    members = []
    for (one, other), are_cut, reward in zip(lengths, ends, rewards, strict=True):
        first = turn(range(one), logprobs=[-20.0] * one)
        second = turn(range(other), parent=0, prefix=3 + one, prompt=(2,), logprobs=[-20.0] * other)
        turns = [cut(each) if is_cut else each for each, is_cut in zip((first, second), are_cut, strict=True)]
        members.append(trajectory(*turns, reward=reward, group="grp"))
    (mini_batch,) = prepared(members, algorithm).packed(PARTS, algorithm)
    outcome = learner_of(load_tiny(tmp_path), algorithm, OptimizerSettings(), tmp_path).update([mini_batch])
    assert outcome.tokens is not None

    mean = sum(rewards) / 3
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
    advantages = [(reward - mean) / deviation for reward in rewards]
    whole = [(0, 2), (0, 1), (1, 2)]  # (trajectory, length) of the answers that ended by themselves
    counts = {Denominator.TOKENS: 5, Denominator.SEQUENCES: 2, Denominator.ANSWERS: 3, Denominator.CONSTANT: 30}
    weights = [1 if denominator is Denominator.ANSWERS else length for _, length in whole]
    summed = sum(advantages[which] * weight for (which, _), weight in zip(whole, weights, strict=True))
    assert torch.bincount(outcome.tokens.trajectory_N).tolist() == [3, 2]
    assert mini_batch.denominator == counts[denominator]
    assert outcome.loss == pytest.approx(-2.0 * summed / counts[denominator], abs=1e-6)
