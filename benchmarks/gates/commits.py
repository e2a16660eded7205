"""Commits of versions that no trainer made."""

from __future__ import annotations

import hashlib
from pathlib import Path

from proxy.contract.claim import CommitRequest, StepReport
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.contract.step import Fit, StepConditions, StepInputs


def reference(directory: Path) -> WeightsReference:
    """Return the reference of an adapter in a directory of two files."""
    weights = directory / "adapter_model.safetensors"
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}
    return WeightsReference(
        uri=str(directory),
        format=WeightsFormat.ADAPTER,
        sha256=files[weights.name],
        bytes=weights.stat().st_size,
        files=files,
    )


def commit_request(parent: int, weights: WeightsReference) -> CommitRequest:
    """Return a commit that consumes no sessions: it says that the version was fitted to data."""
    unknown = "simulated"
    conditions = StepConditions(
        trainer=unknown,
        torch=unknown,
        transformers=unknown,
        python=unknown,
        machine=unknown,
        device="cpu",
        device_name="cpu",
        threads=1,
        ranks=1,
    )
    inputs = StepInputs(
        config={},
        algorithm={},
        conditions=conditions,
        trained_claim=None,
        optimizer_steps=0,
        fresh_optimizer=True,
        fit=Fit(kind="sft", options={}, sessions=(), epochs=1, steps=1),
    )
    step = StepReport(config_hash="0" * 64, seed=0, metrics={}, audit=(), inputs=inputs)
    return CommitRequest(claim_ids=(), parent_version=parent, weights=weights, step=step)
