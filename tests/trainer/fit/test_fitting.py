"""Compare steps over packed rows with losses written out side by side, and check the scores of a reward model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.contract.policy import Head
from proxy.contract.trajectory import Trajectory
from tests.trainer.tiny import load_tiny, save_tiny_model, trajectory, turn
from trainer.algorithm.preferences import PreferenceInputs, preference_loss
from trainer.config import BatchSettings, LearningRate, OptimizerSettings, Packing, Precision, PreferenceForm
from trainer.errors import NothingToFit
from trainer.fit.fitting import Imitation, Preferences, Progress, Ranking, train
from trainer.fit.records import Example, Pair, held_out
from trainer.fit.reward_model import load_reward_model, save_reward_model
from trainer.models.huggingface import PolicyModel

SMALL = BatchSettings(packing=Packing.PACKED, row_tokens=12, max_tokens_per_microbatch=12)
LARGE = BatchSettings(max_tokens_per_microbatch=256)
CPU = torch.device("cpu")


def branching(*outputs: tuple[int, ...]) -> Trajectory:
    """Return a session with several leaves, so that one side is several sequences."""
    root = turn(outputs[0], prompt=(1, 2, 3))
    rest = [turn(output, prompt=(9,), parent=0, prefix=3 + len(outputs[0])) for output in outputs[1:]]
    return trajectory(root, *rest)


PAIRS = [
    Pair(id="prf_1", chosen=branching((10, 11), (12, 13, 14), (15,)), rejected=branching((20, 21, 22), (23,))),
    Pair(id="prf_2", chosen=branching((30,)), rejected=branching((31, 32), (33, 34))),
    Pair(id="prf_3", chosen=branching((40, 41), (42,)), rejected=branching((43,))),
]


def reckoned(model: PolicyModel, side: Trajectory) -> tuple[torch.Tensor, int]:
    """Return (summed log-probability of all outputs, number of their tokens), each after its own prompt, from
    transformers' logits."""
    inner: Any = model.inner
    paths: list[list[int]] = []
    total, tokens = torch.zeros(()), 0
    for node in side.turns:
        before = [] if node.parent is None else paths[node.parent][: node.prefix_tokens]
        prompt = [*before, *node.prompt_ids]
        paths.append([*prompt, *node.output_ids])
        logits_TV = inner(input_ids=torch.tensor([paths[-1]]), use_cache=False).logits[0].log_softmax(-1)
        for place, token in enumerate(node.output_ids, len(prompt)):
            total = total + logits_TV[place - 1, token]
            tokens += 1
    return total, tokens


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other")
    save_tiny_model(directory, seed=5)
    return directory


@pytest.mark.parametrize("settings", [SMALL, LARGE])
@pytest.mark.parametrize("form", list(PreferenceForm))
def test_preferences_over_micro_batches_have_the_gradient_of_the_whole(
    tiny_model: Path, other_model: Path, form: PreferenceForm, settings: BatchSettings
) -> None:
    """The reference keeps the log-probabilities of the initial weights, which have changed since."""
    model = load_tiny(tiny_model)
    objective = Preferences(model, settings, CPU, form, 0.3, 0.0)
    objective.remember(PAIRS)
    reference = [[reckoned(model, side)[0].item() for side in (pair.chosen, pair.rejected)] for pair in PAIRS]
    model.load_state_dict(load_tiny(other_model).state_dict())
    found = objective.accumulate(PAIRS)
    ours = gradients(model)

    model.zero_grad()
    values = [[reckoned(model, side) for side in (pair.chosen, pair.rejected)] for pair in PAIRS]
    loss = preference_loss(
        PreferenceInputs(
            chosen_P=torch.stack([row[0][0] for row in values]),
            rejected_P=torch.stack([row[1][0] for row in values]),
            reference_chosen_P=torch.tensor(reference)[:, 0],
            reference_rejected_P=torch.tensor(reference)[:, 1],
            chosen_tokens_P=torch.tensor([row[0][1] for row in values]),
            rejected_tokens_P=torch.tensor([row[1][1] for row in values]),
            share_P=torch.full((3,), 1 / 3),
        ),
        form,
        0.3,
    ).loss
    torch.autograd.backward(loss)
    assert found == pytest.approx(loss.item(), rel=1e-4)
    for name, wanted in gradients(model).items():
        torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-3)
    assert objective.evaluate(PAIRS)["loss"] == pytest.approx(found, rel=1e-5)


def test_before_the_first_step_the_dpo_loss_is_log_two_for_every_pair(tiny_model: Path) -> None:
    objective = Preferences(load_tiny(tiny_model), SMALL, CPU, PreferenceForm.SIGMOID, 0.1, 0.0)
    objective.remember(PAIRS)
    figures = objective.evaluate(PAIRS)
    assert figures["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(figures["margin"]) < 1e-6


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_imitation_over_micro_batches_is_the_mean_over_all_tokens(tiny_model: Path, settings: BatchSettings) -> None:
    model = load_tiny(tiny_model)
    examples = [Example(id=pair.id, trajectory=pair.chosen) for pair in PAIRS]
    objective = Imitation(model, settings, CPU)
    found = objective.accumulate(examples)
    ours = gradients(model)
    model.zero_grad()
    values = [reckoned(model, each.trajectory) for each in examples]
    loss = -sum((total for total, _ in values), torch.zeros(())) / sum(tokens for _, tokens in values)
    torch.autograd.backward(loss)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert objective.evaluate(examples)["loss"] == pytest.approx(found, rel=1e-6)
    for name, wanted in gradients(model).items():
        torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-3)


def scored(classifier: Any, side: Trajectory) -> torch.Tensor:
    """Return the score of the whole path of the last turn by transformers' own forward pass."""
    node = side.turns[-1]
    before = []
    if node.parent is not None:
        parent = side.turns[node.parent]
        before = [*parent.prompt_ids, *parent.output_ids][: node.prefix_tokens]
    ids = [*before, *node.prompt_ids, *node.output_ids]
    logits: torch.Tensor = classifier(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0, 0]


def last_alone(side: Trajectory) -> Trajectory:
    """Return the session as `records.pairs_of` prepares it for a reward model."""
    turns = [msgspec.structs.replace(node, trainable=node is side.turns[-1]) for node in side.turns]
    return msgspec.structs.replace(side, turns=tuple(turns))


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_a_reward_model_over_micro_batches(tiny_model: Path, tmp_path: Path, settings: BatchSettings) -> None:
    head = Head(run_id="run_1", run_name="policy", version=0, base_model=str(tiny_model), weights=None)  # type: ignore[arg-type]
    model = load_reward_model(head, tiny_model, Precision.FLOAT32, 3)
    pairs = [Pair(id=each.id, chosen=last_alone(each.chosen), rejected=last_alone(each.rejected)) for each in PAIRS]
    found = Ranking(model, settings, CPU).accumulate(pairs)
    ours = gradients(model)
    model.zero_grad()
    ahead = torch.stack(
        [scored(model.classifier, each.chosen) - scored(model.classifier, each.rejected) for each in PAIRS]
    )
    loss = -torch.nn.functional.logsigmoid(ahead).mean()
    torch.autograd.backward(loss)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    for name, wanted in gradients(model).items():
        torch.testing.assert_close(ours[name], wanted, atol=1e-5, rtol=1e-3)

    from transformers import AutoModelForSequenceClassification

    output = tmp_path / "judge"
    save_reward_model(model, tiny_model, output, {"kind": "reward-model"})
    read: Any = AutoModelForSequenceClassification.from_pretrained(output, dtype=torch.float32)
    torch.testing.assert_close(scored(read, PAIRS[0].chosen), scored(model.classifier, PAIRS[0].chosen))
    assert json.loads((output / "tokenizer_config.json").read_text()) == {"made_for": "tests"}
    assert [path.name for path in tmp_path.iterdir()] == ["judge"]


def test_steps_and_their_order_follow_from_the_seed(tiny_model: Path) -> None:
    examples = [Example(id=str(index), trajectory=branching((10 + index, 11))) for index in range(5)]
    told: list[list[Progress]] = []
    weights = []
    for seed in (1, 1, 2):
        model = load_tiny(tiny_model)
        told.append([])
        course = train(
            model,
            Imitation(model, SMALL, CPU),
            examples,
            OptimizerSettings(learning_rate=1e-3, warmup_steps=4),
            epochs=2,
            batch=2,
            seed=seed,
            report=told[-1].append,
        )
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert (course.steps, course.skipped, course.learning_rate) == (6, 0, 1e-3)
    assert [(each.epoch, each.step, each.of) for each in told[0]] == [
        (1, 1, 6),
        (1, 2, 6),
        (1, 3, 6),
        (2, 4, 6),
        (2, 5, 6),
        (2, 6, 6),
    ]
    assert told[0] == told[1] != told[2]
    assert torch.equal(weights[0], weights[1])


def test_the_learning_rate_decays_over_the_steps_of_a_fit(tiny_model: Path) -> None:
    examples = [Example(id=str(index), trajectory=branching((10 + index, 11))) for index in range(4)]
    model = load_tiny(tiny_model)
    told: list[Progress] = []
    settings = OptimizerSettings(learning_rate=1e-3, schedule=LearningRate.LINEAR, minimum_share=0.0)
    train(model, Imitation(model, SMALL, CPU), examples, settings, epochs=2, batch=2, seed=0, report=told.append)
    assert [each.learning_rate for each in told] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model: Path) -> None:
    model = load_tiny(tiny_model)
    with torch.no_grad():
        model.inner.get_input_embeddings().weight[10] = math.inf  # type: ignore[operator]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(NothingToFit, match="finite"):
        train(
            model,
            Imitation(model, SMALL, CPU),
            [Example(id="a", trajectory=branching((10, 11)))],
            OptimizerSettings(),
            epochs=1,
            batch=1,
            seed=0,
            report=lambda _: None,
        )
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("count", "share", "out"), [(10, 0.2, 2), (10, 0.0, 0), (2, 0.01, 1), (1, 0.5, 0), (0, 0.5, 0), (4, 0.99, 3)]
)
def test_the_held_out_examples_do_not_depend_on_the_order(count: int, share: float, out: int) -> None:
    examples = [Example(id=str(index), trajectory=branching((1,))) for index in range(count)]
    learnt, rest = held_out(examples, share)
    assert (len(learnt), len(rest)) == (count - out, out)
    assert held_out(examples[::-1], share) == (learnt, rest)
