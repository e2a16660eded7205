"""Make a committed step again from what the store has of it, and compare the weights with the committed ones.

A step follows from its parent's weights and trainer state, its batch, its configuration and its seed. Trainer states
of old versions are removed. Then the state of a version is made again by replaying the step before it, back to a
version that has a state or to the base model, which needs none.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from proxy.contract.delta import is_delta
from proxy.contract.policy import WeightsFormat
from proxy.contract.replay import StepBatch
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import TrainerSettings
from trainer.errors import ReplayImpossible, WeightsUnusable
from trainer.models.adapters import AdaptedPolicy
from trainer.models.huggingface import resolve_directory
from trainer.models.policy import Policy
from trainer.models.state_dict import joint_digest, whole_weights
from trainer.parallel.checkpoint import load_state, save_state
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.publish.adapters import merged
from trainer.publish.publisher import TrainerState
from trainer.publish.restoring import has_weights, restore_version
from trainer.publish.shards import write_shards
from trainer.replay.configuration import recorded_configuration
from trainer.replay.models import ReplayModels
from trainer.replay.plan import batches_of, inputs_of
from trainer.replay.verdict import ConditionDifference, Verdict, tensor_differences
from trainer.runtime.conditions import conditions, differences
from trainer.update import Learner, Outcome
from trainer.user_code import UserFunction
from trainer.versions import check_format, means_of, state_after


class Replay:
    """Makes steps again. Every rank calls the same methods; the first one has the verdict.

    `functions` are the user's own functions that the configuration of this machine names, by algorithm part. The
    record of a step identifies its functions by the SHA-256 of their files. That record comes over the network, so a
    file is executed only if the configuration here names it.
    """

    def __init__(self, ranks: Ranks, functions: Mapping[str, UserFunction] | None = None) -> None:
        self._ranks = ranks
        self._functions = functions or {}
        self._models = ReplayModels(ranks)

    def run(self, chain: Sequence[StepBatch]) -> Verdict | None:
        """Replay the steps of `plan` and return the verdict on the last one; None on other ranks than the first.

        Raises ReplayImpossible if an earlier step of the chain gives other weights than were committed.
        """
        directory = Path(self._ranks.from_first(lambda: tempfile.mkdtemp(prefix="base-rl-replay-")))
        try:
            return self._run(chain, directory)
        finally:
            if self._ranks.is_first:
                shutil.rmtree(directory, ignore_errors=True)

    def _run(self, chain: Sequence[StepBatch], directory: Path) -> Verdict | None:
        state_directory: Path | None = None
        for step in chain:
            settings, algorithm = recorded_configuration(step, self._functions)
            self._ranks = self._ranks.arranged(layout_of(settings))
            learner = self._learner(step, settings, algorithm)
            state = self._restore(step, learner, state_directory)
            means, outcome = self._repeat(step, settings, algorithm, learner, means_of(state, algorithm))
            tensors = whole_weights(learner.model.named_weights(), self._ranks)
            if self._ranks.is_first:
                tensors = _as_committed(tensors, step, learner.model)
            sha256 = self._ranks.from_first(lambda: _sha256(tensors, step))  # noqa: B023 - called at once
            if step is not chain[-1]:
                self._check_intermediate(step, sha256, chain[-1].version)
                # By files, because the next step may divide the state among the ranks in another way.
                state_directory = directory / str(step.version)
                save_state(state_after(learner, means, dtype_of(step)), state_directory, self._ranks)
        replayed = tuple(each.version for each in chain)
        return self._verdict(chain[-1], tensors, sha256, outcome, replayed) if self._ranks.is_first else None

    def _learner(self, step: StepBatch, settings: TrainerSettings, algorithm: Algorithm) -> Learner:
        models, head = self._models, step.parent
        model = models.policy(head, settings, self._ranks)
        reference = models.reference(head, settings, model, self._ranks) if algorithm.has_reference else None
        critic = models.critic(head, settings, self._ranks) if algorithm.has_critic else None
        return Learner(model, algorithm, settings.optimizer, self._ranks, reference, critic)

    def _restore(self, step: StepBatch, learner: Learner, directory: Path | None) -> TrainerState | None:
        """Restore the state that the step began with: from `directory` if the step before was replayed, else from the
        parent version. Raises ReplayImpossible."""
        if directory is not None:
            state: TrainerState | None = load_state(directory, self._ranks, learner.divided())
        else:
            base = resolve_directory(step.parent.base_model)
            try:
                state = restore_version(step.parent, base, learner.model, self._ranks, learner.divided())
                check_format(state, step.parent)
            except WeightsUnusable as error:
                raise ReplayImpossible(f"version {step.version} cannot be begun from its parent: {error}") from error
        if inputs_of(step).fresh_optimizer:
            state = None
        learner.restore(state)
        wanted = inputs_of(step).optimizer_steps
        if learner.steps != wanted:
            raise ReplayImpossible(
                f"version {step.version} was made after {wanted} optimiser steps, and its parent's trainer state is"
                f" of {learner.steps}: that is not the state it was made from"
            )
        return state

    def _repeat(
        self, step: StepBatch, settings: TrainerSettings, algorithm: Algorithm, learner: Learner, means: RunningMeans
    ) -> tuple[RunningMeans, Outcome | None]:
        """Prepare the batches in their order and train the one that was trained; the others only move the means."""
        outcome = None
        for claimed in batches_of(step):
            prepared = prepare(
                claimed, step.parent.version, settings.batch, algorithm, means, learner.model.vocabulary
            )
            means = prepared.advantages.means
            if claimed.claim_id != inputs_of(step).trained_claim:
                continue
            mini_batches = prepared.packed(settings.batch, algorithm, learner.packings)
            torch.manual_seed(step.seed + self._ranks.rank)
            outcome = learner.update(mini_batches)
        return means, outcome

    def _check_intermediate(self, step: StepBatch, sha256: str, version: int) -> None:
        if sha256 != step.weights.sha256:
            changes = [f"{each.name} {each.then} then, {each.now} now" for each in self._changes(step)]
            raise ReplayImpossible(
                f"version {version} stands on version {step.version}, whose trainer state was not kept,"
                " and replaying that step gives other weights than were committed. Keep more states"
                " (trainer.weights.keep_optimizer_states); what is different here:"
                f" {'; '.join(changes) or 'nothing that is recorded'}"
            )

    def _verdict(
        self,
        step: StepBatch,
        tensors: dict[str, Tensor],
        sha256: str,
        outcome: Outcome | None,
        replayed: tuple[int, ...],
    ) -> Verdict:
        identical = sha256 == step.weights.sha256
        whole = has_weights(step.weights) and not is_delta(step.weights)
        compared = not identical and not step.removed and whole
        return Verdict(
            version=step.version,
            identical=identical,
            committed_sha256=step.weights.sha256,
            replayed_sha256=sha256,
            replayed=replayed,
            trajectories=sum(claimed.trajectory_count for claimed in step.claims),
            committed_loss=step.metrics.get("loss"),
            replayed_loss=None if outcome is None else outcome.loss,
            committed_gradient_norm=step.metrics.get("gradient_norm"),
            replayed_gradient_norm=None if outcome is None else outcome.gradient_norm,
            conditions=tuple(self._changes(step)),
            compared=compared,
            tensors=tuple(tensor_differences(tensors, Path(step.weights.uri))) if compared else (),
        )

    def _changes(self, step: StepBatch) -> list[ConditionDifference]:
        found = differences(inputs_of(step).conditions, conditions(self._ranks))
        return [ConditionDifference(name=name, then=then, now=now) for name, then, now in found]


def dtype_of(step: StepBatch) -> torch.dtype:
    """Return the dtype in which the step's weights were published."""
    return torch.bfloat16 if inputs_of(step).weights_dtype == "bfloat16" else torch.float32


def _as_committed(tensors: dict[str, Tensor], step: StepBatch, model: Policy) -> dict[str, Tensor]:
    """Return the tensors as the version's files have them: an adapter is merged if it was published so."""
    if step.weights.format is WeightsFormat.ADAPTER:
        return tensors
    if isinstance(model, AdaptedPolicy):
        tensors = merged(tensors, model.config, resolve_directory(step.parent.base_model))
    return {name: tensor.to(dtype_of(step)) for name, tensor in tensors.items()}


def _sha256(tensors: dict[str, Tensor], step: StepBatch) -> str:
    most = inputs_of(step).shard_bytes or sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory(prefix="base-rl-replay-") as directory:
        return joint_digest(write_shards(tensors, Path(directory), most))
