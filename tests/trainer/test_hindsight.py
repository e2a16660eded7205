"""Learning from feedback in words: what the teacher reads, and what it adds to the advantages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.arrays import pack_ids, unpack_ids
from proxy.contract.claim import ClaimedBatch, SkipReason
from proxy.contract.identifiers import ClaimId
from proxy.contract.trajectory import Trajectory
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.tiny import VOCABULARY, draw, group_of, learner_of, load_tiny, settings, trajectory, turn
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import flatten
from trainer.batching.hindsight import shift_of, teacher_sequences
from trainer.batching.preparation import Prepared, prepare
from trainer.batching.staleness import drop_unusable, unusable
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings
from trainer.errors import ConfigurationError
from trainer.models.huggingface import PolicyModel
from trainer.update import Outcome

HINT = (9, 8, 7, 6)


def algorithm(**parts: Any) -> Algorithm:
    given = {"hindsight_coefficient": 0.5, **parts}
    return resolve(AlgorithmSettings.model_validate(given))


def hinted(
    member: Trajectory, *places: Sequence[tuple[int, int]], hints: Sequence[Sequence[int]] = (HINT,)
) -> Trajectory:
    """Return the trajectory with hints at the given places of its turns."""
    turns = tuple(
        msgspec.structs.replace(each, hints=tuple(own)) for each, own in zip(member.turns, places, strict=True)
    )
    return msgspec.structs.replace(member, turns=turns, hints=tuple(pack_ids(hint) for hint in hints))


def drawn(model: PolicyModel, count: int, *, reward: float | None = None) -> list[Trajectory]:
    """Sample trajectories of two turns, each with one hint before the first answer and one before the second."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        ((first, logprobs),) = draw(model, (1, 2, 3), 4, generator)
        ((second, later),) = draw(model, (1, 2, 3, *first, 5), 3, generator)
        member = trajectory(
            turn(first, logprobs=logprobs),
            turn(second, prompt=(5,), parent=0, prefix=7, logprobs=later),
            reward=reward,
        )
        made.append(hinted(member, [(2, 0)], [(2, 0), (7, 1)], hints=[HINT, (4, 4)]))
    return made


def prepared(members: Sequence[Trajectory], parts: Algorithm) -> Prepared:
    claim = ClaimedBatch(
        claim_id=ClaimId("clm"),
        lease_expires_at=0.0,
        base_version=0,
        groups=tuple(group_of([each], None) for each in members),
    )
    return prepare(claim, 0, BatchSettings(), parts, RunningMeans.fresh(0.9), VOCABULARY)


def update(base: Path, members: Sequence[Trajectory], parts: Algorithm) -> tuple[Outcome, PolicyModel]:
    model, small = load_tiny(base), BatchSettings(max_tokens_per_microbatch=24)
    learner = learner_of(model, parts, OptimizerSettings(learning_rate=1e-3), base)
    ready = prepared(members, parts)
    return learner.update(ready.packed(small, parts), None, ready.hinted(small, parts)), model


@torch.no_grad()
def scored(model: PolicyModel, ids: Sequence[int], output: Sequence[int]) -> list[float]:
    """Return the log-probabilities of `output` behind `ids`, in float64."""
    inner: Any = model.inner
    logits_TV = inner.double()(input_ids=torch.tensor([[*ids, *output]]), use_cache=False).logits[0].log_softmax(-1)
    inner.float()
    return [logits_TV[len(ids) + at - 1, token].item() for at, token in enumerate(output)]


def test_advantages_are_those_of_a_reference_in_float64(tiny_model: Path) -> None:
    """A_reward + k · clip(teacher − policy, ±c): one trajectory with a reward in a group of its own, one without."""
    parts = algorithm(hindsight_clip=0.7, baseline="none", scale="none")
    members = drawn(load_tiny(tiny_model), 3)
    members[1] = msgspec.structs.replace(members[1], reward=0.25)
    outcome, _ = update(tiny_model, members, parts)
    tokens = outcome.tokens
    assert tokens is not None
    base = load_tiny(tiny_model)
    clipped = 0
    for index, member in enumerate(members):
        first, second = member.turns
        question, before = [1, 2, 3], [1, 2, 3, *first.output_ids, 5]
        read = {0: [1, 2, *HINT, 3], 1: [1, 2, *HINT, 3, *first.output_ids, 4, 4, 5]}
        for number, (answer, prompt) in enumerate(((first, question), (second, before))):
            policy = scored(base, prompt, answer.output_ids)
            teacher = scored(base, read[number], answer.output_ids)
            apart = [min(0.7, max(-0.7, theirs - ours)) for theirs, ours in zip(teacher, policy, strict=True)]
            clipped += sum(abs(value) == 0.7 for value in apart)
            expected = [(member.reward or 0.0) + 0.5 * value for value in apart]
            here = (tokens.trajectory_N == index) & (tokens.turn_N == number)
            assert tokens.advantages_N[here].tolist() == pytest.approx(expected, abs=1e-4)
    assert 0 < clipped < 21
    assert outcome.hindsight is not None
    assert (outcome.hindsight.answers, outcome.hindsight.ignored, outcome.hindsight.tokens) == (6, 0, 21)


def test_the_policy_moves_towards_the_teacher_without_any_reward(tiny_model: Path) -> None:
    parts = algorithm(hindsight_coefficient=1.0)
    members = drawn(load_tiny(tiny_model), 32)
    before, after = load_tiny(tiny_model), update(tiny_model, members, parts)[1]

    def gain(model: PolicyModel) -> float:
        """Return Σ (teacher − policy at first) · policy over the tokens of all first answers."""
        total = 0.0
        for member in members:
            ids = member.turns[0].output_ids
            teacher, own = scored(before, [1, 2, *HINT, 3], ids), scored(before, [1, 2, 3], ids)
            now = scored(model, [1, 2, 3], ids)
            total += sum((a - b) * c for a, b, c in zip(teacher, own, now, strict=True))
        return total

    assert gain(after) > gain(before)


def test_answers_without_hints_learn_nothing_from_words(tiny_model: Path) -> None:
    parts = algorithm()
    members = drawn(load_tiny(tiny_model), 2)
    plain = msgspec.structs.replace(
        members[0], reward=1.0, turns=tuple(msgspec.structs.replace(each, hints=()) for each in members[0].turns)
    )
    tokens = update(tiny_model, [plain, members[1]], parts)[0].tokens
    assert tokens is not None
    assert set(tokens.advantages_N[tokens.trajectory_N == 0].tolist()) == {
        1.0
    }  # its reward, as nothing compares with it
    assert tokens.advantages_N[tokens.trajectory_N == 1].abs().min() > 0


def test_texts_that_say_nothing_are_ignored_and_counted(tiny_model: Path) -> None:
    members = drawn(load_tiny(tiny_model), 2)
    outcome, _ = update(tiny_model, members, algorithm(hindsight_floor=1e9))
    assert outcome.hindsight is not None
    assert (outcome.hindsight.answers, outcome.hindsight.ignored, outcome.hindsight.tokens) == (4, 4, 0)
    assert outcome.tokens is not None
    assert outcome.tokens.advantages_N.abs().max() == 0


def test_the_floor_is_of_whole_answers() -> None:
    trajectory_N, turn_N = torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 1])
    policy_N = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    teacher = {(0, 0): [-1.0, -1.2], (0, 1): [-1.0, -9.0]}
    shift = shift_of(trajectory_N, turn_N, policy_N, teacher, clip=5.0, floor=0.2)
    assert shift.shift_N.tolist() == [0.0, 0.0, 0.0, -5.0]
    assert (shift.answers, shift.ignored, shift.ignored_N.tolist()) == (2, 1, [True, True, False, False])


outputs = st.lists(st.integers(10, 30), min_size=1, max_size=4)


@given(st.lists(st.tuples(outputs, st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_each_hinted_answer_is_read_once_with_its_own_hints(drawn_turns: list[tuple[list[int], bool, bool]]) -> None:
    """In a conversation whose turns continue each other, with hints before the first answer and before others."""
    turns, places, path = [], [], 0
    for number, (output, about_session, about_turn) in enumerate(drawn_turns):
        turns.append(turn(output, prompt=(1, 2), parent=number - 1 if number else None, prefix=path))
        own = [(1, 0)] if about_session else []
        places.append([*own, (path + 1, number + 1)] if about_turn else own)
        path += 2 + len(output)
    hints = [(50,), *((51 + number,) for number in range(len(turns)))]
    member = hinted(trajectory(*turns, reward=None), *places, hints=hints)
    read: dict[int, list[int]] = {}
    for sequence in teacher_sequences([member]):
        for span in sequence.spans:
            assert span.turn not in read
            assert sequence.ids[span.start : span.start + span.length] == member.turns[span.turn].output_ids
            read[span.turn] = [token for token in sequence.ids[: span.start] if token >= 50]
            rest = [token for token in sequence.ids[: span.start] if token < 50]
            assert rest == [
                token for each in member.turns[: span.turn] for token in (*each.prompt_ids, *each.output_ids)
            ] + [1, 2]
    assert read == {
        number: [unpack_ids(member.hints[index])[0] for _, index in own] for number, own in enumerate(places) if own
    }


def test_a_session_without_a_reward_is_usable_only_for_its_words() -> None:
    member = hinted(trajectory(turn([4]), reward=None), [(2, 0)])
    assert unusable(member, 0, 4, 64) is SkipReason.NO_REWARD
    assert unusable(member, 0, 4, 64, from_words=True) is None
    bare = trajectory(turn([4]), reward=None)
    batch, dropped = drop_unusable(flatten([group_of([member, bare])], 0), 4, 64, from_words=True)
    assert (batch.trajectories, dropped) == ((member,), {1: SkipReason.NO_REWARD})


@pytest.mark.parametrize(
    ("place", "hint"), [((0, 0), HINT), ((4, 0), HINT), ((2, 1), HINT), ((2, -1), HINT), ((2, 0), (64,))]
)
def test_hints_that_do_not_fit_are_malformed(place: tuple[int, int], hint: tuple[int, ...]) -> None:
    member = hinted(trajectory(turn([4]), reward=1.0), [place], hints=[hint])
    assert unusable(member, 0, 4, 64, from_words=True) is SkipReason.MALFORMED


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"distill_coefficient": 0.5}, "hindsight_coefficient: .*distill_coefficient"),
        ({"preset": "ppo"}, "hindsight_coefficient: .*critic"),
        ({"hindsight_coefficient": 0.0, "hindsight_clip": 1.0}, "hindsight_clip: texts teach nothing"),
    ],
)
def test_what_goes_ill_together_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        algorithm(**parts)


@pytest.mark.parametrize("parts", [{}, {"preset": "dapo"}, {"preset": "reinforce_pp"}])
def test_a_trainer_makes_a_version_of_texts_alone(
    start: Start, tiny_model: Path, tmp_path: Path, parts: dict[str, Any]
) -> None:
    members = drawn(load_tiny(tiny_model), 8)
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([group_of([member], None) for member in members])
    chosen = {"hindsight_coefficient": 1.0, **parts}
    trainer = start(proxy, settings(tmp_path, algorithm=chosen))
    trainer.loop.resume()
    trainer.loop.step()
    (commit,) = proxy.commits
    metrics = commit.step.metrics
    assert (metrics["hindsight_answers"], metrics["hindsight_ignored"]) == (16, 0)
    assert metrics["hindsight_shift"] > 0
    assert (metrics["trajectories"], metrics["gradient_norm"] > 0) == (8, True)


def test_a_session_without_a_reward_does_not_lower_the_mean_reward(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    members = drawn(load_tiny(tiny_model), 8)
    members[0] = msgspec.structs.replace(members[0], reward=3.0)
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([group_of([member], None) for member in members])
    trainer = start(proxy, settings(tmp_path, algorithm={"hindsight_coefficient": 1.0}))
    trainer.loop.resume()
    trainer.loop.step()
    assert proxy.commits[0].step.metrics["reward_mean"] == 3.0
