"""Functions that the processes of a gang run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models.archon.steps import batch_of, two_updates
from trainer.algorithm.presets import resolve
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.loading import Residents, load_learnt, load_trained, reference_of
from trainer.models.adapters import AdaptedPolicy
from trainer.models.divided import DividedWeights
from trainer.models.state_dict import whole_weights
from trainer.parallel.layout import Layout, layout_of
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import local_part
from trainer.publish.shards import shards_of, write_divided, write_shards
from trainer.update import Learner


def divided(ranks: Ranks, directory: Path, settings: TrainerSettings) -> dict[str, Any] | None:
    return two_updates(directory, settings, ranks.arranged(layout_of(settings)))


def several(ranks: Ranks, cases: Sequence[tuple[Path, TrainerSettings]]) -> list[dict[str, Any] | None]:
    """Run `divided` several times in the same processes."""
    return [divided(ranks, directory, settings) for directory, settings in cases]


def beside(ranks: Ranks, directory: Path, settings: TrainerSettings, layout: str) -> dict[str, Any] | None:
    """Train a transformers model on ranks that divide another one."""
    return two_updates(directory, settings, ranks.arranged(Layout.parse(layout)))


def published(ranks: Ranks, directory: Path, settings: TrainerSettings, target: Path) -> None:
    """Write the weights of a divided model as a version's files, which are those of weights gathered first."""
    model_ranks = ranks.arranged(layout_of(settings))
    model = load_trained(directory, settings, model_ranks)
    tensors = whole_weights(model.named_weights(), model_ranks)
    sums = write_divided(DividedWeights(model.named_weights(), model_ranks, None), target, 20_000, model_ranks)
    if ranks.is_first:
        with tempfile.TemporaryDirectory() as other:
            assert write_shards(tensors, Path(other), 20_000) == sums


def refused_by_a_disk(ranks: Ranks, directory: Path, settings: TrainerSettings, target: Path) -> str:
    """Return the first rank's error if it cannot write the second file. Every rank gets to the end."""
    model_ranks = ranks.arranged(layout_of(settings))
    model = load_trained(directory, settings, model_ranks)
    weights = DividedWeights(model.named_weights(), model_ranks, None)
    if not ranks.is_first:
        assert write_divided(weights, target, 20_000, model_ranks) == {}
        return ""
    (target / shards_of(weights.described, 20_000)[1].file).mkdir()
    with pytest.raises(OSError) as refusal:  # noqa: PT011 - which one differs between systems
        write_divided(weights, target, 20_000, model_ranks)
    return str(refusal.value)


def full(ranks: Ranks, directory: Path, settings: TrainerSettings) -> None:
    """Let the last rank run out of memory in a forward pass: it reports it as without a pipeline, and the others lose
    it."""
    ranks = ranks.arranged(layout_of(settings))
    model = load_trained(directory, settings, ranks)
    rows = [each.rows for each in batch_of(settings)[0].micro_batches]
    is_last = ranks.rank == ranks.size - 1

    def is_full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    if is_last:
        model.layers[0].register_forward_pre_hook(is_full)
    with pytest.raises(torch.OutOfMemoryError if is_last else RuntimeError):
        model.learn(rows, lambda number, scores: scores.logprobs_N.sum())


def refused(ranks: Ranks, directory: Path, settings: TrainerSettings) -> str:
    """Return the error for a refused layout."""
    with pytest.raises(ConfigurationError) as refusal:
        load_trained(directory, settings, ranks.arranged(layout_of(settings)))
    return str(refusal.value)


def sharing(ranks: Ranks, directory: Path, configured: Sequence[TrainerSettings]) -> dict[str, Any]:
    """Two updates of each run's adapter, in turns over one base model, and the same updates over bases of their own.

    Return the weights of both, the local elements that the runs hold together, and those of one run alone.
    """
    residents = Residents()
    learners = [_learner_of(directory, each, ranks, residents) for each in configured]
    held = elements(learner.model for learner in learners)
    for _ in range(2):
        for place, (learner, each) in enumerate(zip(learners, configured, strict=True)):
            others = [other for number, other in enumerate(learners) if number != place]
            before = [_state_of(other) for other in others]
            assert learner.update(batch_of(each)).stepped
            for other, state in zip(others, before, strict=True):
                assert all(torch.equal(one, two) for one, two in zip(_state_of(other), state, strict=True))
    shared = [whole_weights(learner.model.named_weights(), ranks) for learner in learners]
    alone = []
    for each in configured:
        learner = _learner_of(directory, each, ranks, Residents())
        for _ in range(2):
            learner.update(batch_of(each))
        alone.append(whole_weights(learner.model.named_weights(), ranks))
    adapter = sum(tensor.numel() for tensor in learner.model.tensors)  # type: ignore[attr-defined]
    counts = {"held": held, "held_alone": elements([learner.model]), "adapter": adapter}
    return {"shared": shared, "alone": alone, **counts}


def _learner_of(directory: Path, settings: TrainerSettings, ranks: Ranks, residents: Residents) -> Learner:
    model = load_learnt(directory, settings, ranks, residents)
    algorithm = resolve(settings.algorithm)
    reference = reference_of(model, directory, settings, ranks) if algorithm.has_reference else None
    return Learner(model, algorithm, settings.optimizer, ranks, reference)


def _state_of(learner: Learner) -> list[torch.Tensor]:
    """Copy this rank's part of an adapter and of its optimiser's moments, without giving it the slot."""
    assert isinstance(learner.model, AdaptedPolicy)
    moments = [
        local_part(value)
        for state in learner.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [tensor.clone() for tensor in [*learner.model.tensors, *moments]]


def elements(policies: Iterable[Any]) -> int:
    """Count the elements of all tensors that policies hold on this rank, those that they share once."""
    tensors = {}
    for policy in policies:
        model = policy.adapters.model
        for tensor in [*(local_part(weight.detach()) for weight in model.parameters()), *policy.tensors]:
            tensors[tensor.data_ptr()] = tensor.numel()
    return sum(tensors.values())
