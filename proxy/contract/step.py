"""What a training step was made with and what it saw of single tokens: enough to make it again and to explain it."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.identifiers import ClaimId, PreferenceId, SessionId, TurnId


class StepConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step was computed. The same batch from the same state gives the same bits only where these are equal.

    `trainer` is the version of this program; `machine` the processor's architecture with its vector instructions;
    `device` is `cpu` or `cuda`, `device_name` which GPU. `threads` are those of torch in each of `ranks` processes.
    """

    trainer: str
    torch: str
    transformers: str
    python: str
    machine: str
    device: str
    device_name: str
    threads: int
    ranks: int


class FittedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a version was fitted to: its name without folders, its SHA-256, and how many rows it has,
    including those that were left out or held out."""

    name: str
    sha256: str
    rows: int


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What a version was fitted to that no claim handed out. `kind` is `sft`, `dpo` or `kto`, `options` what it was
    told. `sessions` are all that it learnt from, those of its `preferences` included; what came from an export may be
    of another run. `files` are those whose rows it learnt from in their place. It went `epochs` times through them,
    in `steps` optimiser steps of an optimiser of its own."""

    kind: str
    options: dict[str, Any]
    sessions: tuple[SessionId, ...]
    preferences: tuple[PreferenceId, ...] = ()
    epochs: int
    steps: int
    files: tuple[FittedFile, ...] = ()


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a step depends on besides its batch, its seed and its parent's weights.

    `config` is the trainer's configuration without addresses, keys and names; `algorithm` its preset with what the
    configuration changes in it. `trained_claim` began the batch whose gradient made the step; the other batches
    taught nothing, were kept, and only moved the running means, in the order of `claim_ids`. None: all were.
    `taken_together` names the claims of each batch that consisted of several, in the order in which they were joined;
    any other claim was a batch of its own. `optimizer_steps` were taken before the step. `fresh_optimizer`: the
    optimiser was new, as the parent is the base model or its trainer state was not there. `fit`: the version was
    fitted to what somebody chose, and no claim made it; the optimiser of the steps was not touched.
    """

    config: dict[str, Any]
    algorithm: dict[str, Any]
    conditions: StepConditions
    trained_claim: ClaimId | None
    optimizer_steps: int
    fresh_optimizer: bool
    fit: Fit | None = None
    taken_together: tuple[tuple[ClaimId, ...], ...] = ()


class TokenAudit(msgspec.Struct, frozen=True, kw_only=True):
    """A trained turn token by token, in the order of its output. `logprobs` are the trainer's before the step,
    `engine_logprobs` those recorded when the turn was drawn; their difference is the logarithm of the ratio."""

    session_id: SessionId
    turn_id: TurnId
    logprobs: tuple[float, ...]
    engine_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    staleness: tuple[int, ...]
    clipped: tuple[bool, ...]

    def __post_init__(self) -> None:
        lengths = {
            len(each) for each in (self.logprobs, self.engine_logprobs, self.advantages, self.staleness, self.clipped)
        }
        if len(lengths) != 1:
            raise ValueError(f"turn {self.turn_id}: its columns have different lengths")
