"""Functions that the processes of a gang run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from proxy.contract.policy import Head
from tests.trainer.models.archon.steps import batch_of, two_updates
from tests.trainer.publish.receiver import receive
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import SESSION, Observation, RunningMeans
from trainer.config import CollectiveWeights, DiskWeights, TensorsWeights, TrainerSettings
from trainer.errors import WeightsUnusable
from trainer.loading import load_critic, load_learnt
from trainer.models.divided import DividedWeights
from trainer.models.state_dict import whole_weights
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.parallel.state_files import StateWriter
from trainer.publish.collective import CollectivePublisher
from trainer.publish.disk import DiskPublisher
from trainer.publish.tensors import TensorsPublisher
from trainer.update import Learner
from trainer.versions import state_after

MEANS = RunningMeans.fresh(0.9).after([Observation("a task", place, 0.1) for place in (SESSION, 0, 1)])


def divided(ranks: Ranks, directory: Path, settings: TrainerSettings) -> dict[str, Any] | None:
    return two_updates(directory, settings, ranks.arranged(layout_of(settings)))


def failing(ranks: Ranks, directory: Path, settings: TrainerSettings) -> tuple[Any, ...]:
    """Make an update in which something fails. Return whether a step was taken, why not, and the weights before and
    after."""
    model = load_learnt(directory, settings, ranks)
    before = whole_weights(model.named_weights(), ranks)
    outcome = Learner(model, resolve(settings.algorithm), settings.optimizer, ranks).update(batch_of(settings))
    return outcome.stepped, outcome.failure, before, whole_weights(model.named_weights(), ranks)


def go_on(
    ranks: Ranks, base: Path, settings: TrainerSettings, directory: Path, heads: Sequence[Head], updates: int
) -> list[list[Head]]:
    """Continue from each version with a new model and optimiser. Return the versions made by this many updates."""
    ranks = ranks.arranged(layout_of(settings))
    publisher = DiskPublisher(DiskWeights(directory=directory, keep_optimizer_states=100), base, ranks=ranks)
    found = []
    for head in heads:
        learner = _resumed(ranks, base, settings, publisher, head)
        made = [head]
        for _ in range(updates):
            made.append(_next(ranks, settings, publisher, made[-1], learner))
        found.append(made[1:])
    publisher.close()
    return found


def through_memory(ranks: Ranks, base: Path, settings: TrainerSettings, directory: Path, head: Head) -> Head:
    """Publish a version through memory, gathered tensor by tensor, and write its directory afterwards."""
    ranks = ranks.arranged(layout_of(settings))
    chosen = TensorsWeights(directory=directory, memory_directory=directory.parent / "memory")
    publisher = TensorsPublisher(chosen, base, ranks=ranks)
    learner = _resumed(ranks, base, settings, publisher, head)
    assert learner.update(batch_of(settings)).stepped
    tensors = DividedWeights(learner.model.named_weights(), ranks, publisher.dtype)
    staged = publisher.stage(head, tensors, state_after(learner, MEANS))
    assert staged.save is not None
    assert not Path(staged.weights.uri).exists()
    saved = staged.save(0)
    ranks.from_first(lambda: publisher.settle(saved))
    publisher.close()
    return msgspec.structs.replace(head, version=head.version + 1, weights=saved.weights)


def sent_to_engines(
    ranks: Ranks, base: Path, settings: TrainerSettings, directory: Path, head: Head
) -> tuple[Head, bool]:
    """Publish a version through a process group with an engine, which asks twice. Return whether it got both times
    what the directory has."""
    ranks = ranks.arranged(layout_of(settings))
    publisher = CollectivePublisher(
        CollectiveWeights(directory=directory), base, ranks=ranks, proxy_url="http://127.0.0.1:8080"
    )
    learner = _resumed(ranks, base, settings, publisher, head)
    assert learner.update(batch_of(settings)).stepped
    tensors = DividedWeights(learner.model.named_weights(), ranks, publisher.dtype)
    staged = publisher.stage(head, tensors, state_after(learner, MEANS))
    assert staged.save is not None
    assert staged.offer is not None
    received: list[dict[str, torch.Tensor]] = []
    offer = staged.offer
    engine = Thread(target=lambda: received.extend(receive(offer) for _ in range(2)))
    if ranks.is_first:
        engine.start()
    saved = staged.save(2)
    if ranks.is_first:
        engine.join(60)
    ranks.from_first(lambda: publisher.settle(saved))
    publisher.close()

    def are_equal() -> bool:
        written = load_file(Path(saved.weights.uri) / "model.safetensors")
        return len(received) == 2 and all(
            each.keys() == written.keys() and all(torch.equal(each[name], written[name]) for name in written)
            for each in received
        )

    made = msgspec.structs.replace(head, version=head.version + 1, weights=saved.weights)
    return made, ranks.from_first(are_equal)


def die_while_writing(ranks: Ranks, base: Path, settings: TrainerSettings, directory: Path, head: Head) -> None:
    """Kill every rank with SIGKILL after it has written its own part."""
    write = StateWriter.write_data

    def die(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    _with_writer(ranks, base, settings, directory, head, die)


def refused_by_a_disk(ranks: Ranks, base: Path, settings: TrainerSettings, directory: Path, head: Head) -> str:
    """Return every rank's error if the second one's disk is full."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightsUnusable) as refusal:
        _with_writer(ranks, base, settings, directory, head, refuse if ranks.rank == 1 else None)
    return str(refusal.value)


def _with_writer(
    ranks: Ranks,
    base: Path,
    settings: TrainerSettings,
    directory: Path,
    head: Head,
    write: Callable[..., None] | None,
) -> None:
    publisher = DiskPublisher(DiskWeights(directory=directory), base, ranks=ranks)
    learner = _resumed(ranks, base, settings, publisher, head)
    if write is not None:
        setattr(StateWriter, "write_data", write)  # noqa: B010 - of this process alone
    _next(ranks, settings, publisher, head, learner)


def _resumed(ranks: Ranks, base: Path, settings: TrainerSettings, publisher: DiskPublisher, head: Head) -> Learner:
    algorithm = resolve(settings.algorithm)
    critic = load_critic(base, settings, ranks) if algorithm.has_critic else None
    learner = Learner(load_learnt(base, settings, ranks), algorithm, settings.optimizer, ranks, None, critic)
    learner.restore(publisher.restore(head, learner.model, learner.divided()))
    return learner


def _next(ranks: Ranks, settings: TrainerSettings, publisher: DiskPublisher, head: Head, learner: Learner) -> Head:
    assert learner.update(batch_of(settings)).stepped
    tensors = whole_weights(learner.model.named_weights(), ranks)
    staged = publisher.stage(head, tensors, state_after(learner, MEANS))
    ranks.from_first(lambda: publisher.settle(staged))
    return msgspec.structs.replace(head, version=head.version + 1, weights=staged.weights)
