"""The steps and batches to make again for one step, from what the store has of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from proxy.contract.claim import ClaimedBatch
from proxy.contract.replay import StepBatch
from proxy.contract.step import Fit, StepInputs
from trainer.batching.grouping import joined
from trainer.errors import ReplayImpossible
from trainer.publish.restoring import has_state, has_weights

Steps = Callable[[int], StepBatch]
"""Return the step that made a version; raise ReplayImpossible."""


def plan(steps: Steps, version: int) -> list[StepBatch]:
    """Return the steps to make again, oldest first: back from `version` to one whose initial state is available.

    Raises ReplayImpossible, with what to do, if the store lacks a part of one of them.
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
    """Return the batches that the step's trainer prepared, in order: its claims, joined as they were."""
    # A batch may have been claimed while its parent was still being committed: its head was then one version older.
    parent = step.parent.version
    claims = {
        claimed.claim_id: msgspec.structs.replace(claimed, base_version=parent)
        for claimed in step.claims
        if claimed.claim_id is not None
    }
    together = {ids[0]: ids for ids in inputs_of(step).taken_together}
    later = {claim_id for ids in together.values() for claim_id in ids[1:]}
    return [
        joined([claims[each] for each in together[claim_id]]) if claim_id in together else claimed
        for claim_id, claimed in claims.items()
        if claim_id not in later
    ]


def inputs_of(step: StepBatch) -> StepInputs:
    """Return the inputs that the trainer recorded with the step. Raises ReplayImpossible if it recorded none."""
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
    if inputs.older_optimizer:
        raise ReplayImpossible(
            f"version {step.version} was made after a restart from a version without an optimiser state of its own"
            " (trainer.weights.optimizer_every); later steps can be replayed"
        )
    if inputs.algorithm.get("distill_coefficient"):
        raise ReplayImpossible(
            f"version {step.version} was learnt from a teacher too, and what that said is not in the store"
        )
    if inputs.algorithm.get("hindsight_coefficient"):
        raise ReplayImpossible(
            f"version {step.version} was learnt from feedback in words too, and the prompts that were made of it are"
            " not in the store"
        )
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


def _can_begin(step: StepBatch) -> bool:
    """Return whether the step's initial state is available: its parent's weights, and its parent's trainer state
    unless the step began with a fresh optimiser."""
    parent = step.parent.weights
    if parent is None:
        return True
    if step.parent_removed or not has_weights(parent):
        return False
    return inputs_of(step).fresh_optimizer or has_state(parent)
