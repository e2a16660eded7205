from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from proxy.contract.trajectory import Trajectory
from proxy.contract.turn import LogprobConvention
from tests.trainer.tiny import ALONE, draw, learner_of, load_tiny, save_tiny_model, trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import PRESETS, resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.batching.teaching import Taught
from trainer.config import (
    AlgorithmSettings,
    Baseline,
    BatchSettings,
    Correction,
    Divergence,
    OptimizerSettings,
    Packing,
    Proximal,
    Scale,
)
from trainer.models.huggingface import PolicyModel
from trainer.optimizer import learning_rate_at
from trainer.update import Learner


def packed_of(
    members: list[Trajectory],
    groups: list[int],
    algorithm: AlgorithmSettings | None = None,
    settings: BatchSettings | None = None,
) -> list[MiniBatch]:
    batch = Batch(trajectories=tuple(members), groups=tuple(groups), base_version=0)
    parts = resolve(algorithm or AlgorithmSettings())
    advantages = assign(members, groups, parts, RunningMeans.fresh(0.9))
    return mini_batches(batch, advantages.turns, linearise(members), settings or BatchSettings(), parts)


def taught(algorithm: Algorithm, members: list[Trajectory], told: list[float]) -> Taught | None:
    """Return a teacher's log-probabilities, `told[i]` above the behaviour's for trajectory i, or None without a
    teacher."""
    if not algorithm.has_teacher:
        return None
    return {
        (index, number): [logprob + told[index] for logprob in each.logprobs]
        for index, member in enumerate(members)
        for number, each in enumerate(member.turns)
    }


def logprob(model: PolicyModel, member: Trajectory) -> float:
    """Return the summed log-probability of the outputs of a one-turn trajectory."""
    node = member.turns[0]
    ids = torch.tensor([*node.prompt_ids, *node.output_ids])
    start = len(node.prompt_ids)
    with torch.no_grad():
        found, _ = model(
            ids[None],
            torch.arange(len(ids))[None],
            torch.arange(start - 1, len(ids) - 1),
            ids[start:],
            torch.full((len(node.output_ids),), node.temperature),
        )
    return float(found.sum())


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("preset", "proximal"),
    [
        (preset, proximal)
        for preset, algorithm in PRESETS.items()
        for proximal in (Proximal if algorithm.learns_from_rewards else [None])
        if (preset, proximal) != ("m2po", "behaviour")
    ],
)
def test_an_outcome_moves_in_the_direction_of_its_reward(
    tiny_model: Path, preset: str, proximal: Proximal | None, sign: float, size: int
) -> None:
    """One trajectory of a group has the reward `sign` and the others 0, or a teacher prefers it, whatever its
    reward."""
    model = load_tiny(tiny_model)
    generator = torch.Generator().manual_seed(size)
    members = []
    for index in range(size):
        ((output, logprobs),) = draw(model, (1, 2, 3), 4, generator)
        node = turn(output, logprobs=logprobs)
        rewarded = sign if PRESETS[preset].learns_from_rewards else -sign
        members.append(trajectory(node, reward=rewarded if index == 0 else 0.0))
    algorithm = AlgorithmSettings(preset=preset, proximal=proximal)
    packed = packed_of(members, [0] * size, algorithm)
    before = logprob(model, members[0])
    learner = learner_of(model, resolve(algorithm), OptimizerSettings(learning_rate=1e-4), tiny_model)
    assert learner.update(packed, taught(resolve(algorithm), members, [sign] + [0.0] * (size - 1))).stepped
    assert (logprob(model, members[0]) - before) * sign > 1e-5


def test_at_staleness_zero_the_ratio_is_one(tiny_model: Path) -> None:
    """Log-probabilities are computed at the temperature at which each turn was sampled."""
    model = load_tiny(tiny_model)
    generator = torch.Generator().manual_seed(0)
    members = []
    for temperature in (0.6, 1.0, 1.7):
        ((output, logprobs),) = draw(model, (1, 2, 3), 6, generator, temperature)
        members.append(trajectory(turn(output, logprobs=logprobs, temperature=temperature), reward=temperature))
    packed = packed_of(members, [0, 0, 0])
    outcome = Learner(model, resolve(AlgorithmSettings()), OptimizerSettings(), ALONE).update(packed)
    assert outcome.tokens is not None
    assert (outcome.tokens.logprobs_N - outcome.tokens.behaviour_N).abs().max() < 1e-5


@pytest.mark.parametrize("proximal", list(Proximal))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constrained_tokens_are_weighted_by_the_policys_probability_of_everything_allowed(
    tiny_model: Path, proximal: Proximal, sign: float
) -> None:
    """The model must not be credited with the effect of the constraint. The last token was the only one allowed."""
    model, prompt, allowed = load_tiny(tiny_model), (1, 2, 3), [5, 9, 11]
    with torch.no_grad():
        every, _ = model(
            torch.tensor([prompt]), torch.arange(3)[None], torch.tensor([2] * 3), torch.tensor(allowed), torch.ones(3)
        )
    total = float(every.logsumexp(0))
    node = turn(
        [allowed[1], 4],
        prompt=prompt,
        logprobs=[float(every[1]) - total, 0.0],
        convention=LogprobConvention.CONSTRAINED,
    )
    members = [trajectory(node, reward=sign), trajectory(turn([7], logprobs=[-4.0]), reward=0.0)]
    algorithm = AlgorithmSettings(proximal=proximal)
    packed = packed_of(members, [0, 0], algorithm)
    outcome = learner_of(model, resolve(algorithm), OptimizerSettings(), tiny_model).update(packed)
    assert outcome.tokens is not None
    mine = outcome.tokens.trajectory_N == 0
    assert outcome.tokens.weight_N[mine][0].item() == pytest.approx(math.exp(total), rel=1e-4)
    assert not outcome.tokens.clipped_N[mine].any(), "and no clip takes its gradient away"
    assert outcome.tokens.altered_N.tolist() == mine.tolist()


def test_a_turn_without_a_choice_gives_no_gradient(tiny_model: Path) -> None:
    forced = turn([4, 5], logprobs=[0.0, 0.0], convention=LogprobConvention.CONSTRAINED)
    members = [trajectory(forced, reward=1.0), trajectory(forced, reward=0.0)]
    packed = packed_of(members, [0, 0])
    learner = Learner(load_tiny(tiny_model), resolve(AlgorithmSettings()), OptimizerSettings(), ALONE)
    assert learner.update(packed).gradient_norm == 0.0


@pytest.mark.parametrize("bound", [16, 64])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_micro_batches_change_nothing(tiny_model: Path, preset: str, bound: int) -> None:
    """This includes trajectories without an advantage, which are scored without a backward pass."""
    generator = torch.Generator().manual_seed(0)
    members = [
        trajectory(turn(torch.randint(0, 64, (5,), generator=generator).tolist()), reward=float(index % 3 == 0))
        for index in range(12)
    ]
    groups = [0] * 4 + [1] * 4 + [2, 2, 3, 3]
    weights = []
    for settings in (
        BatchSettings(),
        BatchSettings(packing=Packing.PACKED, row_tokens=16, max_tokens_per_microbatch=bound),
    ):
        model = load_tiny(tiny_model)
        algorithm = AlgorithmSettings(preset=preset, mini_batches=1)
        packed = packed_of(members, groups, algorithm, settings)
        optimizer = OptimizerSettings(learning_rate=1e-3, eps=1e-4)
        learner = learner_of(model, resolve(algorithm), optimizer, tiny_model)
        outcome = learner.update(packed, taught(resolve(algorithm), members, [0.5, -0.5, 0.0] * 4))
        assert outcome.tokens is not None
        assert len(outcome.tokens.logprobs_N) == 12 * 5
        critic = {} if learner.critic is None else dict(learner.critic.model.named_weights())
        weights.append({**dict(model.named_weights()), **{f"critic.{name}": each for name, each in critic.items()}})
    assert len(packed[0].micro_batches) > 1
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("proximal", list(Proximal))
def test_mini_batches_compare_with_the_policy_at_the_start(tiny_model: Path, proximal: Proximal) -> None:
    """Each mini-batch is one optimiser step, and every trajectory is in one of them; the record has the values before
    the first."""
    generator = torch.Generator().manual_seed(0)
    members = []
    model = load_tiny(tiny_model)
    for index in range(8):
        ((output, logprobs),) = draw(model, (1, 2, 3), 4, generator)
        members.append(trajectory(turn(output, logprobs=logprobs), reward=float(index % 2)))
    algorithm = AlgorithmSettings(mini_batches=3, proximal=proximal)
    packed = packed_of(members, [0] * 8, algorithm)
    assert [part.denominator for part in packed] == [12, 12, 8]
    learner = learner_of(model, resolve(algorithm), OptimizerSettings(learning_rate=1e-2), tiny_model)
    before = [logprob(model, member) for member in members]
    outcome = learner.update(packed)
    assert learner.steps == 3
    assert outcome.tokens is not None
    sums = torch.zeros(8).index_add(0, outcome.tokens.trajectory_N, outcome.tokens.logprobs_N)
    assert sums.tolist() == pytest.approx(before, abs=1e-4)
    assert outcome.tokens.weight_N.tolist() == pytest.approx([1.0] * 32, abs=1e-4)
    assert outcome.tokens.clipped_N.any(), "the later steps' ratios leave the range"


def test_a_mini_batch_without_signal_joins_another() -> None:
    members = [trajectory(turn([4, 5]), reward=reward) for reward in (1.0, 1.0, 0.0, 1.0)]
    packed = packed_of(members, [0, 1, 0, 1], AlgorithmSettings(mini_batches=2))
    assert [[part.learns for part in mini.micro_batches] for mini in packed] == [[True, False]]
    assert [mini.denominator for mini in packed] == [8]
    dropped = packed_of(members, [0, 1, 0, 1], AlgorithmSettings(mini_batches=2, drop_degenerate=True))
    assert [mini.denominator for mini in dropped] == [4]


def test_tokens_with_large_ratios_are_left_out_until_the_second_moment_is_within_its_bound(tiny_model: Path) -> None:
    """The second moment is over the whole batch, however the batch is divided."""
    generator = torch.Generator().manual_seed(0)
    model = load_tiny(tiny_model)
    members = []
    for index in range(6):
        ((output, logprobs),) = draw(model, (1, 2, 3), 4, generator)
        off = [0.1, -0.1, 0.05, 2.0 * (index == 0)]
        shifted = [logprob + shift for logprob, shift in zip(logprobs, off, strict=True)]
        members.append(trajectory(turn(output, logprobs=shifted), reward=float(index % 2)))
    for settings in (
        BatchSettings(),
        BatchSettings(packing=Packing.PACKED, row_tokens=8, max_tokens_per_microbatch=16),
    ):
        algorithm = AlgorithmSettings(preset="m2po")
        packed = packed_of(members, [0] * 6, algorithm, settings)
        outcome = Learner(load_tiny(tiny_model), resolve(algorithm), OptimizerSettings(), ALONE).update(packed)
        assert outcome.tokens is not None
        left_out = outcome.tokens.clipped_N
        assert outcome.tokens.trajectory_N[left_out].tolist() == [0]
        assert (outcome.tokens.logprobs_N - outcome.tokens.behaviour_N)[left_out].item() == pytest.approx(
            -2, abs=1e-4
        )


@pytest.mark.parametrize("form", list(Divergence))
def test_the_divergence_pulls_the_policy_towards_the_reference(
    tiny_model: Path, tmp_path: Path, form: Divergence
) -> None:
    """With advantages near zero, the divergence alone moves the policy."""
    save_tiny_model(tmp_path, seed=1)
    model, base = load_tiny(tiny_model), load_tiny(tmp_path)
    generator = torch.Generator().manual_seed(0)
    algorithm = AlgorithmSettings(kl_coefficient=1.0, kl_form=form, scale=Scale.NONE, clip_high=100.0)
    learner = learner_of(model, resolve(algorithm), OptimizerSettings(learning_rate=5e-3), tmp_path)
    apart = []
    for _ in range(25):
        drawn = draw(model, (1, 2, 3), 3, generator, count=64)
        members = [
            trajectory(turn(output, logprobs=logprobs), reward=1e-6 * (index % 2))
            for index, (output, logprobs) in enumerate(drawn)
        ]
        outcome = learner.update(packed_of(members, [0] * 64, algorithm))
        assert outcome.tokens is not None
        difference_N = outcome.tokens.logprobs_N - outcome.tokens.reference_N
        theirs = sum(logprob(base, member) for member in members)
        assert float(outcome.tokens.reference_N.sum()) == pytest.approx(theirs, abs=1e-2)
        apart.append(float((torch.expm1(-difference_N) + difference_N).mean()))
    assert sum(apart[-5:]) < 0.6 * sum(apart[:5])


@pytest.mark.parametrize("correction", [Correction.NONE, Correction.TRUNCATE, Correction.MASK])
def test_the_divergence_on_stale_tokens_is_weighted_by_the_correction(
    tiny_model: Path, tmp_path: Path, correction: Correction
) -> None:
    """k3 in the loss, in float64: the engine's log-probabilities are chosen so that each bound acts on some token."""
    save_tiny_model(tmp_path, seed=1)
    output, ratios = (4, 5, 6, 7), (0.3, 0.9, 1.8, 7.0)
    model, base = load_tiny(tiny_model), load_tiny(tmp_path)

    def scored(policy: PolicyModel) -> list[float]:
        ids = torch.tensor([1, 2, 3, *output])
        places = torch.arange(2, 6)
        with torch.no_grad():
            logprobs_N, _ = policy(ids[None], torch.arange(7)[None], places, ids[3:], torch.ones(4))
        return [float(value) for value in logprobs_N.tolist()]

    now, held = scored(model), scored(base)
    drawn = [logp - math.log(ratio) for logp, ratio in zip(now, ratios, strict=True)]
    members = [trajectory(turn(output, logprobs=drawn), reward=0.0)]
    algorithm = AlgorithmSettings(
        kl_coefficient=0.5, kl_form=Divergence.K3, correction=correction, baseline=Baseline.NONE, scale=Scale.NONE
    )
    learner = learner_of(model, resolve(algorithm), OptimizerSettings(), tmp_path)
    loss = learner.update(packed_of(members, [0], algorithm)).loss
    weights = {
        Correction.NONE: [1.0] * 4,
        Correction.TRUNCATE: [min(ratio, 2.0) for ratio in ratios],
        Correction.MASK: [ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in ratios],
    }[correction]
    terms = [
        weight * (math.exp(reference - logp) - 1 - (reference - logp))
        for weight, logp, reference in zip(weights, now, held, strict=True)
    ]
    assert loss == pytest.approx(0.5 * math.fsum(terms) / 4, rel=1e-5)


def test_the_gradient_is_clipped_to_its_bound(tiny_model: Path) -> None:
    members = [trajectory(turn([4, 5]), reward=1.0), trajectory(turn([6, 7]), reward=0.0)]
    packed = packed_of(members, [0, 0], AlgorithmSettings(mini_batches=1))
    norms = []
    for bound in (1e6, 1e-3):
        model = load_tiny(tiny_model)
        settings = OptimizerSettings(learning_rate=1e6, betas=(0.0, 0.0), eps=1e6, clip_norm=bound)
        before = {name: weight.detach().clone() for name, weight in model.named_weights()}
        outcome = Learner(model, resolve(AlgorithmSettings(mini_batches=1)), settings, ALONE).update(packed)
        # With an eps far above the gradient AdamW's step is lr / eps times the gradient, here the gradient itself.
        steps = [weight.detach() - before[name] for name, weight in model.named_weights()]
        moved = torch.cat([step.flatten() for step in steps]).norm()
        norms.append((outcome.gradient_norm, float(moved)))
    assert norms[0][0] == pytest.approx(norms[1][0])
    assert norms[1][1] == pytest.approx(1e-3, rel=0.01)
    assert norms[0][1] > 100 * norms[1][1]


def test_warm_up_is_linear() -> None:
    settings = OptimizerSettings(learning_rate=4.0, warmup_steps=4)
    assert [learning_rate_at(step, settings) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    for none in (0, 1):
        assert learning_rate_at(0, OptimizerSettings(learning_rate=4.0, warmup_steps=none)) == 4.0
