"""Compare the routers' load-balancing loss with one written from the paper, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.trainer.models.archon.shapes import VOCABULARY, save_random
from tests.trainer.models.archon.steps import settings_of
from tests.trainer.tiny import ALONE, trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.logprobs import token_logprobs
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MicroBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, Precision, TrainerSettings
from trainer.errors import ConfigurationError, UnsupportedModel
from trainer.loading import load_trained
from trainer.models.archon.model import ArchonModel
from trainer.models.archon.moe import MixtureOfExperts, balance_loss
from trainer.models.archon.weights import load_archon
from trainer.models.huggingface import load_policy
from trainer.models.passes import Scores
from trainer.parallel.axes import ALONE as NO_AXIS

WEIGHT = 0.3


def load(directory: Path, *, checkpointing: bool = False) -> ArchonModel:
    return load_archon(directory, Precision.FLOAT32, token_logprobs, activation_checkpointing=checkpointing)


def packed(layout: dict[str, Any]) -> list[MicroBatch]:
    """Return three trajectories that begin with the same token; the second has two branches after one prompt."""
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    first, prompt, last = ([7, *drawn(count)] for count in (3, 4, 6))
    members = [
        trajectory(turn(drawn(6), prompt=first), reward=1.0),
        trajectory(turn(drawn(3), prompt=prompt), turn(drawn(4), prompt=prompt), reward=0.0),
        trajectory(turn(drawn(2), prompt=last), reward=0.2),
    ]
    algorithm = resolve(AlgorithmSettings(mini_batches=1))
    advantages = assign(members, [0, 0, 0], algorithm, RunningMeans.fresh(0.9))
    batch = Batch(trajectories=tuple(members), groups=(0, 0, 0), base_version=0)
    settings = BatchSettings.model_validate(layout)
    (mini_batch,) = mini_batches(batch, advantages.turns, linearise(members), settings, algorithm)
    return list(mini_batch.micro_batches)


def gradient(model: ArchonModel, batches: list[MicroBatch], balance: float) -> dict[str, torch.Tensor]:
    """Return the balance loss's gradient alone: the loss of the scores is zero, with a gradient of zeros."""
    model.zero_grad(set_to_none=True)

    def nothing(_: int, scores: Scores) -> torch.Tensor:
        return 0.0 * scores.logprobs_N.sum()

    model.learn([each.rows._replace(balance=balance) for each in batches], nothing)
    return {name: weight.grad.double() for name, weight in model.named_weights() if weight.grad is not None}


def written_down(model: ArchonModel, batch: MicroBatch, weight: float) -> dict[str, torch.Tensor]:
    """Return E Σ f P as in the paper, with individual weights of tokens, over the router's inputs in float64."""
    seen: list[torch.Tensor] = []
    sparse = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    hooks = [each.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for each in sparse]
    model.zero_grad(set_to_none=True)
    model(*batch.rows)
    for hook in hooks:
        hook.remove()
    total = torch.zeros((), dtype=torch.float64)
    for each, hidden_BTD in zip(sparse, seen, strict=True):
        hidden_ND = hidden_BTD.flatten(0, 1)[batch.predictor_N].double()
        odds_NE = functional.linear(hidden_ND, each.gate.weight.double()).softmax(-1)
        count = odds_NE.shape[1]
        best = odds_NE.argsort(-1, descending=True)[:, : each.per_token]
        f = [float((best == expert).sum()) / best.numel() for expert in range(count)]
        mean_E = odds_NE.mean(0)
        loss = count * sum(share * mean_E[expert] for expert, share in enumerate(f))
        total = total + weight * len(odds_NE) * loss / len(sparse)
    torch.autograd.backward(total)
    return {name: weight.grad.double() for name, weight in model.named_weights() if weight.grad is not None}


PADDED: dict[str, Any] = {"packing": "padded", "max_tokens_per_microbatch": 4096}
LAYOUTS = [PADDED, {**PADDED, "packing": "packed", "row_tokens": 32}, {**PADDED, "packing": "tree"}]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_odds"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_balance_gradient_equals_the_papers(tmp_path: Path, name: str, checkpointing: bool) -> None:
    save_random(tmp_path, name)
    model = load(tmp_path, checkpointing=checkpointing)
    (batch,) = packed(PADDED)
    wanted = written_down(model, batch, WEIGHT)
    found = gradient(model, [batch], WEIGHT)
    assert max(float(each.abs().max()) for each in wanted.values()) > 0.1
    for key, each in wanted.items():
        torch.testing.assert_close(found[key], each, atol=1e-6 * max(1.0, float(each.abs().max())), rtol=1e-5)
    assert not any(each.any() for each in gradient(model, [batch], 0.0).values())


def test_rows_of_every_layout_have_the_same_loss(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3_moe")
    model = load(tmp_path)
    batches = [packed(layout) for layout in LAYOUTS]
    assert [len(each) for each in batches] == [1, 1, 1]
    assert len({each[0].input_ids_BT.shape for each in batches}) == 3
    found = [gradient(model, each, WEIGHT) for each in batches]
    for other in found[1:]:
        for key, each in found[0].items():
            torch.testing.assert_close(other[key], each, atol=1e-5, rtol=1e-4)


def test_an_even_load_costs_the_coefficient_and_an_uneven_one_more() -> None:
    even = torch.full((4, 4), 0.25, requires_grad=True)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    weights = torch.full((4,), 0.5)
    assert balance_loss(even, chosen, weights, NO_AXIS).item() == pytest.approx(2.0)
    lopsided = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4)
    assert balance_loss(lopsided, torch.zeros(4, 1, dtype=torch.long), weights, NO_AXIS).item() == pytest.approx(5.6)
    masked = torch.tensor([0.0, 0.0, 0.0, 0.5])
    assert balance_loss(lopsided, chosen, masked, NO_AXIS).item() == pytest.approx(0.5 * 4 * (0.5 * 0.1 + 0.5 * 0.7))
    assert balance_loss(even, chosen, torch.zeros(4), NO_AXIS).item() == 0.0


def test_only_a_step_with_the_balance_loss_moves_routers_differently(tmp_path: Path) -> None:
    from tests.trainer.models.archon.steps import ALGORITHM, two_updates

    save_random(tmp_path, "qwen3_moe")
    made = [
        two_updates(tmp_path, settings_of(algorithm={**ALGORITHM, "router_aux_coefficient": weight}), ALONE)
        for weight in (0.0, 0.5)
    ]
    plain, balanced = (each["weights"] for each in made if each is not None)
    gates = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert gates
    assert all(not torch.equal(plain[name], balanced[name]) for name in gates)


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3")
    asked = {"algorithm": {"router_aux_coefficient": 0.01}}
    with pytest.raises(ConfigurationError, match="is no mixture of experts"):
        load_trained(tmp_path, TrainerSettings.model_validate({"backend": "archon", **asked}), ALONE)
    with pytest.raises(ValueError, match='mixtures of experts, which need backend = "archon"'):
        TrainerSettings.model_validate(asked)
    (batch,) = packed(PADDED)
    model = load_policy(tmp_path, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    with pytest.raises(UnsupportedModel, match="load-balancing"):
        model(*batch.rows._replace(balance=0.1))
