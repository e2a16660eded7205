"""What a trainer does: publishes weights, and commits them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from proxy.contract.claim import CommitRequest, StepReport, TrajectoryAudit
from proxy.contract.identifiers import ClaimId, SessionId
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.contract.step import Fit, StepConditions, StepInputs


def publish(
    directory: Path, content: bytes | None = None, form: WeightsFormat = WeightsFormat.HUGGINGFACE
) -> WeightsReference:
    """A directory with a made-up weight file."""
    content = content or secrets.token_bytes(16)
    target = directory / f"weights-{secrets.token_hex(8)}"
    target.mkdir(parents=True)
    prefix = "adapter_" if form is WeightsFormat.ADAPTER else ""
    (target / f"{prefix}config.json").write_text("{}")
    (target / f"{prefix}model.safetensors").write_bytes(content)
    return WeightsReference(
        uri=str(target),
        format=form,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
    )


def commit_request(
    claim_ids: Sequence[ClaimId], parent: int, weights: WeightsReference, *, loss: float = 0.25
) -> CommitRequest:
    step = StepReport(config_hash="c" * 64, seed=7, metrics={"loss": loss}, audit=(audit(loss),))
    return CommitRequest(claim_ids=tuple(claim_ids), parent_version=parent, weights=weights, step=step)


def audit(ratio: float) -> TrajectoryAudit:
    return TrajectoryAudit(
        session_id=SessionId("ses_1"),
        reward=1.0,
        advantage=0.5,
        trained_tokens=2,
        staleness_mean=0.0,
        staleness_max=0,
        logprob_gap_mean=0.0,
        logprob_gap_max=0.0,
        ratio_min=ratio,
        ratio_median=ratio,
        ratio_max=ratio,
        clipped_share=0.0,
    )


def fit_request(sessions: Sequence[SessionId], parent: int, weights: WeightsReference) -> CommitRequest:
    inputs = StepInputs(
        config={},
        algorithm={},
        conditions=StepConditions(
            trainer="0",
            torch="0",
            transformers="0",
            python="0",
            machine="m",
            device="cpu",
            device_name="cpu",
            threads=1,
            ranks=1,
        ),
        trained_claim=None,
        optimizer_steps=0,
        fresh_optimizer=True,
        fit=Fit(kind="sft", options={}, sessions=tuple(sessions), epochs=1, steps=1),
    )
    step = StepReport(config_hash="c" * 64, seed=7, metrics={"loss": 0.5}, audit=(), inputs=inputs)
    return CommitRequest(claim_ids=(), parent_version=parent, weights=weights, step=step)
