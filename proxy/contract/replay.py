"""A committed step as its trainer saw it, to be made again."""

from __future__ import annotations

import msgspec

from proxy.contract.claim import ClaimedBatch
from proxy.contract.identifiers import SessionId
from proxy.contract.policy import Head, WeightsReference
from proxy.contract.step import StepInputs


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The step that made `version`.

    `claims` are those it consumed, in the order of the commit, with turns and rewards as they were handed out.
    `missing` are sessions whose turns or rewards are not all there any more: what stands in `claims` for them is not
    what was trained on. `inputs` is None for a step of a trainer that did not tell. `parent_removed`, `removed`: the
    weights of that version have been deleted to save space.
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
