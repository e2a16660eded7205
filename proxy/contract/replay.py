"""A committed step with the inputs of its trainer, for a replay."""

from __future__ import annotations

import msgspec

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import SessionId
from proxy.contract.policy import Head, WeightsReference
from proxy.contract.step import StepInputs


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The step that made `version`.

    `claims` are the consumed claims in the order of the commit, with turns and rewards as the trainer received them.
    `missing` are sessions some of whose turns or rewards have been deleted since: `claims` does not show what was
    trained of them. `inputs` is None for steps of trainers that did not report them. `parent_removed` and `removed`:
    the weights of the parent, or of the version itself, have been deleted to save space.
    """

    version: int
    parent: Head
    parent_removed: bool
    weights: WeightsReference
    removed: bool
    seed: int
    config_hash: str
    inputs: StepInputs | None
    metrics: dict[str, float | None]
    claims: tuple[ClaimedBatch, ...]
    missing: tuple[SessionId, ...]
