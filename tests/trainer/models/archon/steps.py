"""Two optimiser steps on made-up trajectories, and their results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.trainer.models.archon.shapes import VOCABULARY
from tests.trainer.tiny import ALONE, trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import TrainerSettings
from trainer.loading import load_learnt, reference_of
from trainer.models.state_dict import load_weights, save_weights, whole_weights
from trainer.parallel.checkpoint import load_state, save_state
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

ALGORITHM: dict[str, Any] = {
    "kl_coefficient": 0.1,
    "mini_batches": 2,
    "entropy_coefficient": 0.05,
    "top_entropy_share": 0.5,
}
"""Parts that load a reference, score the batch before the step, and learn through the entropies."""


def settings_of(**changes: Any) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "backend": "archon",
            "algorithm": ALGORITHM,
            # An eps above the noise of sums in another order, which AdamW would otherwise amplify to the size of
            # signals.
            "optimizer": {"learning_rate": 0.02, "eps": 1e-2, "clip_norm": 0.5},
            "batch": {"packing": "packed", "row_tokens": 11, "max_tokens_per_microbatch": 22},
            **changes,
        }
    )


def batch_of(settings: TrainerSettings) -> list[MiniBatch]:
    """Return 14 trajectories of different lengths in 4 groups, one of them without a signal; they begin alike."""
    generator = torch.Generator().manual_seed(1)
    members = []
    for index in range(14):
        output = torch.randint(0, VOCABULARY, (3 + index % 5,), generator=generator).tolist()
        prompt = [11, 5, 23, 8][: 2 + index % 3]
        reward = 1.0 if index < 3 else float(index % 3 == 0)
        logprobs = [-4.0 + 0.1 * position for position in range(len(output))]
        members.append(trajectory(turn(output, prompt=prompt, logprobs=logprobs, temperature=0.8), reward=reward))
    groups = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    algorithm = resolve(settings.algorithm)
    advantages = assign(members, groups, algorithm, RunningMeans.fresh(0.9))
    batch = Batch(trajectories=tuple(members), groups=tuple(groups), base_version=0)
    return mini_batches(batch, advantages.turns, linearise(members), settings.batch, algorithm)


def two_updates(directory: Path, settings: TrainerSettings, ranks: Ranks) -> dict[str, Any] | None:
    """Make two updates of two optimiser steps each; in between, everything is saved and restored into a newly loaded
    model.

    Return losses, gradient norms, weights, log-probabilities and optimiser state on the first rank, None on the
    others.
    """
    algorithm = resolve(settings.algorithm)
    packed = batch_of(settings)
    outcomes = []
    saved: Path | None = None
    for _ in range(2):
        model = load_learnt(directory, settings, ranks)
        reference = reference_of(model, directory, settings, ranks) if algorithm.has_reference else None
        learner = Learner(model, algorithm, settings.optimizer, ranks, reference)
        if saved is not None:
            learner.restore(load_state(saved, ranks, learner.divided()))
            load_weights(model.named_weights(), saved)
        outcomes.append(learner.update(packed))
        saved = Path(ranks.from_first(tempfile.mkdtemp))
        save_state(learner.capture(), saved, ranks)
        weights = whole_weights(model.named_weights(), ranks)
        ranks.from_first(lambda: save_weights(weights, saved))  # noqa: B023 - called at once
    if not ranks.is_first:
        return None
    assert saved is not None
    state = load_state(saved, ALONE, {})
    tokens = [outcome.tokens for outcome in outcomes if outcome.tokens is not None]
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.gradient_norm for outcome in outcomes],
        "logprobs": [each.logprobs_N.sort().values for each in tokens],
        "weights": weights,
        "moments": {
            f"{name}.{key}": value for name, each in state["optimizer"].items() for key, value in each.items()
        },
    }


def compare(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compare results. The optimiser's first moments are sums of gradients: each is compared relative to the largest
    value of its tensor, so that small ones are not lost beside others. The second moments are squares of them."""
    for key in ("losses", "norms"):
        for one, other in zip(found[key], wanted[key], strict=True):
            assert abs(one - other) < tolerance * max(1.0, abs(other)), (key, one, other)
    for update, (one, other) in enumerate(zip(found["logprobs"], wanted["logprobs"], strict=True)):
        # The first update's log-probabilities are of equal weights. Those of the second follow steps that amplify the
        # rounding of sums in another order: with qwen2 they differ by 2e-5 on every layout that divides a row.
        torch.testing.assert_close(one, other, atol=tolerance * (4 if update else 1), rtol=0)
    for key in ("weights", "moments"):
        assert found[key].keys() == wanted[key].keys()
        for name, other in wanted[key].items():
            # Twice the tolerance, and four times for squares: kernels of other processors sum in another order.
            scale = 1.0 if key == "weights" else float(other.abs().max()) * (4 if name.endswith("_sq") else 2)
            gap = float((found[key][name] - other).abs().max())
            assert gap <= tolerance * scale, (key, name, gap, scale)
