"""A committed step made again from what the store kept of it, and compared with what was committed.

A step follows from its parent's weights and trainer state, its batch, its configuration and its seed. Trainer states
of old versions are not kept; the state of a version is then made again by replaying the step before, back to a
version that has one or to the base model, which needs none.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError
from torch import Tensor

from proxy.contract.claim import ClaimedBatch
from proxy.contract.policy import Head, WeightsFormat
from proxy.contract.replay import StepBatch
from proxy.contract.step import Fit, StepInputs
from trainer.algorithm.parts import Algorithm, from_json
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import joined
from trainer.batching.preparation import prepare
from trainer.config import Packing, TrainerSettings
from trainer.errors import ConfigurationError, ReplayImpossible, WeightsUnusable
from trainer.loading import load_critic, load_learnt, reference_of
from trainer.models.adapters import AdaptedPolicy
from trainer.models.huggingface import resolve_directory
from trainer.models.policy import Policy, Scorer
from trainer.models.state_dict import digest, put_weights, read_weights, save_weights, whole_weights
from trainer.models.value import ValueModel
from trainer.parallel.checkpoint import load_state, save_state
from trainer.parallel.layout import layout_of
from trainer.parallel.mesh import Ranks
from trainer.publish.adapters import merged
from trainer.publish.disk import has_state, has_weights, restore_version
from trainer.publish.publisher import TrainerState
from trainer.runtime.conditions import conditions, differences
from trainer.update import Learner, Outcome
from trainer.user_code import UserFunction
from trainer.versions import check_format, means_of, state_after

_BATCH_BEFORE = {"packing": Packing.PACKED.value}
"""What steps were made with before it was an option."""

Steps = Callable[[int], StepBatch]
"""The step that made a version; raises ReplayImpossible."""


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A weight that came out another one: how many of its elements, by how much at most."""

    name: str
    elements: int
    of: int
    largest: float


class ConditionDifference(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    then: str
    now: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`replayed` are the steps that were made again, in order; the last is the one in question. `compared`: the
    committed weights were there to say which tensors differ. Of a step without a gradient, loss and norm are None."""

    version: int
    identical: bool
    committed_sha256: str
    replayed_sha256: str
    replayed: tuple[int, ...]
    trajectories: int
    committed_loss: float | None
    replayed_loss: float | None
    committed_gradient_norm: float | None
    replayed_gradient_norm: float | None
    conditions: tuple[ConditionDifference, ...]
    compared: bool
    tensors: tuple[TensorDifference, ...]


def plan(steps: Steps, version: int) -> list[StepBatch]:
    """The steps to make again, oldest first: `version` and those before it back to one that can be begun from.

    Raises ReplayImpossible, with what to do, where the store does not have what it takes.
    """
    chain: list[StepBatch] = []
    while True:
        step = steps(version)
        _check(step)
        chain.insert(0, step)
        if _can_begin(step):
            return chain
        version = step.parent.version


def batches_of(step: StepBatch) -> list[ClaimedBatch]:
    """Return the batches that the step's trainer prepared, in order: its claims, joined as they were then."""
    claims = {claimed.claim_id: claimed for claimed in step.claims if claimed.claim_id is not None}
    together = {ids[0]: ids for ids in inputs_of(step).taken_together}
    later = {claim_id for ids in together.values() for claim_id in ids[1:]}
    return [
        joined([claims[each] for each in together[claim_id]]) if claim_id in together else claimed
        for claim_id, claimed in claims.items()
        if claim_id not in later
    ]


def inputs_of(step: StepBatch) -> StepInputs:
    """Raises ReplayImpossible."""
    if step.inputs is None:
        raise ReplayImpossible(
            f"version {step.version} was made by a trainer that did not tell what it made it with; steps of newer"
            " trainers can be replayed"
        )
    return step.inputs


def _check(step: StepBatch) -> None:
    inputs = inputs_of(step)
    if inputs.fit is not None:
        raise ReplayImpossible(
            f"version {step.version} was fitted to {_fitted_to(inputs.fit)} ({inputs.fit.kind}), and only"
            " steps of the loop are made again"
        )
    _refuse_taught(step, inputs)
    if step.missing:
        named = ", ".join(step.missing[:3]) + (", …" if len(step.missing) > 3 else "")
        raise ReplayImpossible(
            f"of version {step.version}'s batch {len(step.missing)} sessions are not whole in the store any more"
            f" ({named}): they were erased, or retention removed them. Steps can be replayed as long as their"
            " sessions are kept"
        )


def _fitted_to(fit: Fit) -> str:
    if not fit.files:
        return f"{len(fit.sessions)} sessions"
    return f"{sum(file.rows for file in fit.files)} rows of {', '.join(file.name for file in fit.files)}"


def _refuse_taught(step: StepBatch, inputs: StepInputs) -> None:
    if inputs.algorithm.get("distill_coefficient"):
        raise ReplayImpossible(
            f"version {step.version} was learnt from a teacher too, and what that said is not in the store"
        )


def _can_begin(step: StepBatch) -> bool:
    """Whether the state that the step began with is there: its parent's weights, and its trainer state if it went on
    from that."""
    parent = step.parent.weights
    if parent is None:
        return True
    if step.parent_removed or not has_weights(parent):
        return False
    return inputs_of(step).fresh_optimizer or has_state(parent)


class Replay:
    """Makes steps again. Every rank does the same; the first one has the verdict.

    `functions` are those of the user's own in the configuration of this machine, by the part that they are. A step
    names the functions that it was made with by the SHA-256 of their files; its record comes over the network, so a
    file is executed only if the configuration here names it.
    """

    def __init__(self, ranks: Ranks, functions: Mapping[str, UserFunction] | None = None) -> None:
        self._ranks = ranks
        self._functions = functions or {}
        self._model: Policy | None = None
        self._model_key: tuple[object, ...] = ()
        self._model_ranks = ranks
        self._reference: Scorer | None = None
        self._reference_key: tuple[object, ...] = ()
        self._critic: ValueModel | None = None
        self._critic_key: tuple[object, ...] = ()

    def run(self, chain: Sequence[StepBatch]) -> Verdict | None:
        """The verdict on the last step of `plan`'s chain; None on other ranks than the first.

        Raises ReplayImpossible where an earlier one, which the last one stands on, came out another.
        """
        directory = Path(self._ranks.from_first(lambda: tempfile.mkdtemp(prefix="base-rl-replay-")))
        try:
            return self._run(chain, directory)
        finally:
            if self._ranks.is_first:
                shutil.rmtree(directory, ignore_errors=True)

    def _run(self, chain: Sequence[StepBatch], directory: Path) -> Verdict | None:
        """States go from step to step over the `directory`, as layouts may be others."""
        before: Path | None = None
        for step in chain:
            inputs = inputs_of(step)
            settings, algorithm = _configured(step, inputs)
            algorithm = _with_functions(step, algorithm, self._functions)
            self._ranks = self._ranks.arranged(layout_of(settings))
            model = self._loaded(step.parent, settings)
            reference = self._held_to(step.parent, settings, model) if algorithm.has_reference else None
            critic = self._learnt_with(step.parent, settings) if algorithm.has_critic else None
            learner = Learner(model, algorithm, settings.optimizer, self._ranks, reference, critic)
            if before is None:
                state = self._begin(step, learner)
            else:
                state = load_state(before, self._ranks, learner.divided())
            if inputs.fresh_optimizer:
                state = None
            learner.restore(state)
            _check_steps(step, learner)
            means, outcome = self._repeat(step, settings, algorithm, learner, means_of(state, algorithm))
            tensors = whole_weights(learner.model.named_weights(), self._ranks)
            if self._ranks.is_first:
                tensors = _as_committed(tensors, step, model)
            made = self._ranks.from_first(lambda tensors=tensors: _sha256(tensors))  # type: ignore[misc]
            if step is not chain[-1] and made != step.weights.sha256:
                raise ReplayImpossible(
                    f"version {chain[-1].version} stands on version {step.version}, whose trainer state was not kept,"
                    " and replaying that step gives other weights than were committed. Keep more states"
                    " (trainer.weights.keep_optimizer_states); what is different here:"
                    f" {_told(self._changes(step)) or 'nothing that is recorded'}"
                )
            if step is not chain[-1]:
                before = directory / str(step.version)
                save_state(state_after(learner, means), before, self._ranks)
        replayed = tuple(each.version for each in chain)
        return self._verdict(chain[-1], tensors, made, outcome, replayed) if self._ranks.is_first else None

    def _begin(self, step: StepBatch, learner: Learner) -> TrainerState | None:
        base = resolve_directory(step.parent.base_model)
        try:
            state = restore_version(step.parent, base, learner.model, self._ranks, learner.divided())
            check_format(state, step.parent)
        except WeightsUnusable as error:
            raise ReplayImpossible(f"version {step.version} cannot be begun from its parent: {error}") from error
        return state

    def _repeat(
        self, step: StepBatch, settings: TrainerSettings, algorithm: Algorithm, learner: Learner, means: RunningMeans
    ) -> tuple[RunningMeans, Outcome | None]:
        """Go through the batches in their order: those that were kept move the means, the trained one the weights."""
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

    def _loaded(self, head: Head, settings: TrainerSettings) -> Policy:
        """One model for all steps that want the same of it: its weights are replaced."""
        key = (head.base_model, *_built_by(settings), settings.activation_checkpointing)
        if self._model is None or key != self._model_key:
            before = None if self._model is None else whole_weights(self._model.named_weights(), self._model_ranks)
            model = load_learnt(resolve_directory(head.base_model), settings, self._ranks)
            if before is not None:
                tensors = self._ranks.from_first(lambda: before)
                put_weights(model.named_weights(), tensors, "the step before")
            self._model, self._model_key, self._model_ranks = model, key, self._ranks
        return self._model

    def _held_to(self, head: Head, settings: TrainerSettings, model: Policy) -> Scorer:
        """Return the reference of a step, loaded once for all that have the same."""
        if settings.reference.follows:
            return reference_of(model, resolve_directory(head.base_model), settings, self._ranks)
        if isinstance(model, AdaptedPolicy):
            return model.adapters.base
        key = (head.base_model, *_built_by(settings))
        if self._reference is None or key != self._reference_key:
            base = resolve_directory(head.base_model)
            self._reference, self._reference_key = reference_of(model, base, settings, self._ranks), key
        return self._reference

    def _learnt_with(self, head: Head, settings: TrainerSettings) -> ValueModel:
        """The critic's model for all steps that want the same of it: its weights are part of the state."""
        key = (head.base_model, settings.precision, settings.activation_checkpointing)
        if self._critic is None or key != self._critic_key:
            base = resolve_directory(head.base_model)
            self._critic, self._critic_key = load_critic(base, settings, self._ranks), key
        return self._critic

    def _verdict(
        self,
        step: StepBatch,
        tensors: dict[str, Tensor],
        made: str,
        outcome: Outcome | None,
        replayed: tuple[int, ...],
    ) -> Verdict:
        identical = made == step.weights.sha256
        compared = not identical and not step.removed and has_weights(step.weights)
        return Verdict(
            version=step.version,
            identical=identical,
            committed_sha256=step.weights.sha256,
            replayed_sha256=made,
            replayed=replayed,
            trajectories=sum(claimed.trajectory_count for claimed in step.claims),
            committed_loss=step.metrics.get("loss"),
            replayed_loss=None if outcome is None else outcome.loss,
            committed_gradient_norm=step.metrics.get("gradient_norm"),
            replayed_gradient_norm=None if outcome is None else outcome.gradient_norm,
            conditions=tuple(self._changes(step)),
            compared=compared,
            tensors=tuple(_tensor_differences(tensors, Path(step.weights.uri))) if compared else (),
        )

    def _changes(self, step: StepBatch) -> list[ConditionDifference]:
        found = differences(inputs_of(step).conditions, conditions(self._ranks))
        return [ConditionDifference(name=name, then=then, now=now) for name, then, now in found]


def _configured(step: StepBatch, inputs: StepInputs) -> tuple[TrainerSettings, Algorithm]:
    """Raises ReplayImpossible for a configuration that this version of the trainer does not know."""
    config = {**inputs.config, "batch": {**_BATCH_BEFORE, **inputs.config.get("batch", {})}}
    if not torch.cuda.is_available():
        config["offload"] = False  # the same mathematics, where there is nothing to offload from
    try:
        return TrainerSettings.model_validate(config), from_json(inputs.algorithm)
    except (ValidationError, ConfigurationError) as error:
        raise ReplayImpossible(
            f"version {step.version} was made with a configuration that this trainer does not know; use version"
            f" {inputs.conditions.trainer} of base-rl: {error}"
        ) from error


def _with_functions(step: StepBatch, algorithm: Algorithm, here: Mapping[str, UserFunction]) -> Algorithm:
    """Return the algorithm with the files of this machine for the user's own functions. Raises ReplayImpossible if
    one is not named here, or is another than then."""
    found: dict[str, Any] = {}
    for part, then in algorithm.user_functions.items():
        now = here.get(part)
        made_with = (
            f"version {step.version} was made with algorithm.{part} = {Path(then.file).name}:{then.name}, a file of"
            f" SHA-256 {then.sha256}"
        )
        if now is None:
            raise ReplayImpossible(
                f"{made_with}; the configuration here names none: pass the configuration that does by --config"
            )
        if now.sha256 != then.sha256:
            raise ReplayImpossible(
                f"{made_with}; {now.file} differs, its SHA-256 is {now.sha256}: put the file back as it was"
            )
        found[part] = dataclasses.replace(then, file=now.file)
    return dataclasses.replace(algorithm, **found)


def _built_by(settings: TrainerSettings) -> tuple[object, ...]:
    """What a model in memory depends on besides its weights."""
    built = settings.backend, settings.layout, settings.pipeline_schedule, settings.precision, settings.head_precision
    return *built, settings.adapter, settings.offload, settings.algorithm.learns_entropy


def _check_steps(step: StepBatch, learner: Learner) -> None:
    wanted = inputs_of(step).optimizer_steps
    if learner.steps != wanted:
        raise ReplayImpossible(
            f"version {step.version} was made after {wanted} optimiser steps, and its parent's trainer state is of"
            f" {learner.steps}: that is not the state it was made from"
        )


def _as_committed(tensors: dict[str, Tensor], step: StepBatch, model: Policy) -> dict[str, Tensor]:
    """Whole weights where the version has such of an adapter."""
    if not isinstance(model, AdaptedPolicy) or step.weights.format is WeightsFormat.ADAPTER:
        return tensors
    return merged(tensors, model.config, resolve_directory(step.parent.base_model))


def _sha256(tensors: dict[str, Tensor]) -> str:
    with tempfile.TemporaryDirectory(prefix="base-rl-replay-") as directory:
        save_weights(tensors, Path(directory))
        return digest(Path(directory))[0]


def _tensor_differences(tensors: dict[str, Tensor], committed: Path) -> list[TensorDifference]:
    found = []
    stored = read_weights(committed)
    for name, tensor in sorted(tensors.items()):
        if name not in stored or stored[name].shape != tensor.shape:
            found.append(
                TensorDifference(name=name, elements=tensor.numel(), of=tensor.numel(), largest=float("inf"))
            )
            continue
        changed = stored[name] != tensor
        if bool(changed.any()):
            largest = (stored[name] - tensor).abs().max().item()
            found.append(TensorDifference(name=name, elements=int(changed.sum()), of=tensor.numel(), largest=largest))
    return found


def _told(changes: Sequence[ConditionDifference]) -> str:
    return "; ".join(f"{change.name} {change.then} then, {change.now} now" for change in changes)
