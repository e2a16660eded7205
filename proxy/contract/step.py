"""The inputs of a training step and its audit of single tokens, for replaying and explaining it."""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.contract.identifiers import ClaimId, PreferenceId, SessionId, TurnId


class StepConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a step. Equal batches and states give equal bits only in equal environments.

    `trainer` is this program's version. `machine` is the processor's architecture with its vector instructions.
    `device` is `cpu` or `cuda`, and `device_name` the model of the GPU. `threads` counts torch's threads in each of
    `ranks` processes.
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
    """A file that a version was fitted to: its name without folders, its SHA-256, and the number of its rows,
    including rows that were skipped or held out."""

    name: str
    sha256: str
    rows: int


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a version was fitted to without a claim, and how.

    `kind` is `sft`, `dpo` or `kto`, and `options` are the command's. `sessions` are all sessions that were learnt
    from, including those of `preferences`; sessions from an export may belong to another run. `files` are the files
    that were learnt from instead of sessions. The fit took `steps` optimiser steps in `epochs` passes over the data,
    with an optimiser of its own.
    """

    kind: str
    options: dict[str, Any]
    sessions: tuple[SessionId, ...]
    preferences: tuple[PreferenceId, ...] = ()
    epochs: int
    steps: int
    files: tuple[FittedFile, ...] = ()


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a step other than its batch, its seed and its parent's weights.

    - `config`: the trainer's configuration without addresses, keys and names.
    - `algorithm`: the preset with the configuration's changes.
    - `trained_claim`: the first claim of the batch whose gradient made the step. The other batches had nothing to
      learn from and only moved the running means, in the order of `claim_ids`. None if no batch was trained.
    - `taken_together`: the claims of each batch that joined several, in the order of joining. Any other claim was a
      batch of its own.
    - `optimizer_steps`: the number of optimiser steps before this step.
    - `fresh_optimizer`: the optimiser was new, because the parent is the base model or has no trainer state.
    - `older_optimizer`: the step came after a restart from a version without an optimiser state of its own, with the
      state of an earlier version, so it cannot be replayed.
    - `weights_dtype`, `shard_bytes`: the precision of the published weights, and the largest file; 0: one file.
    - `fit`: the version was fitted to chosen data instead of claims, and the optimiser of the steps was not used.
    """

    config: dict[str, Any]
    algorithm: dict[str, Any]
    conditions: StepConditions
    trained_claim: ClaimId | None
    optimizer_steps: int
    fresh_optimizer: bool
    fit: Fit | None = None
    taken_together: tuple[tuple[ClaimId, ...], ...] = ()
    older_optimizer: bool = False
    weights_dtype: str = "float32"
    shard_bytes: int = 0


class TokenAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The audit of a trained turn, one value for each output token. `logprobs` are the trainer's before the step,
    `engine_logprobs` those recorded at generation; their difference is the logarithm of the ratio."""

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
