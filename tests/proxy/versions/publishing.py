"""The part of a trainer that publishes weights and commits them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from proxy.contract.claim import CommitRequest, StepReport, TrajectoryAudit
from proxy.contract.delta import DELTA_INDEX, DeltaBlock, DeltaFile, DeltaIndex, encode_block
from proxy.contract.identifiers import ClaimId, SessionId
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.contract.step import Fit, StepConditions, StepInputs
from proxy.versions.inspector import WeightsInspector
from proxy.versions.service import VersionService
from proxy.versions.steering import VersionSteering
from tests.proxy.turns.world import World


def inspector() -> WeightsInspector:
    """Return an inspector that accepts versions in any directory."""
    return WeightsInspector(Path("/"))


def versions_of(world: World) -> VersionService:
    return VersionService(database=world.database, clock=world.clock, signals=world.signals, inspector=inspector())


def steering_of(world: World) -> VersionSteering:
    return VersionSteering(database=world.database, clock=world.clock, signals=world.signals)


def publish(
    directory: Path,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    form: WeightsFormat = WeightsFormat.HUGGINGFACE,
    config: Mapping[str, Any] | None = None,
) -> WeightsReference:
    """Write a version's directory with the given tensors, or with random ones whose sizes are those of any other."""
    target = directory / f"weights-{secrets.token_hex(8)}"
    target.mkdir(parents=True)
    if form is WeightsFormat.ADAPTER:
        layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        made = {f"{layer}A.weight": 0.3 * random_numbers(2, 4), f"{layer}B.weight": 0.01 * random_numbers(4, 2)}
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **(config or {})}
        prefix = "adapter_"
    else:
        made, prefix = {"weight": 1 + 0.1 * random_numbers(4)}, ""
    save_file(dict(made if tensors is None else tensors), target / f"{prefix}model.safetensors")
    (target / f"{prefix}config.json").write_text(json.dumps(config or {}))
    return reference(target, form)


def publish_difference(directory: Path, base: WeightsReference) -> tuple[WeightsReference, bytes]:
    """Write a version as its difference to `base`, a whole version of one file. Return the whole content too."""
    whole = Path(publish(directory).uri) / "model.safetensors"
    new, old = whole.read_bytes(), (Path(base.uri) / "model.safetensors").read_bytes()
    target = directory / f"weights-{secrets.token_hex(8)}"
    target.mkdir()
    stored, sha256 = encode_block(new, old, 1), hashlib.sha256(new).hexdigest()
    described = DeltaFile(sha256, len(new), (DeltaBlock(len(new), len(stored), 1),))
    (target / "model.safetensors.delta").write_bytes(stored)
    (target / DELTA_INDEX).write_bytes(msgspec.json.encode(DeltaIndex(base, {"model.safetensors": described})))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.iterdir()}
    reference = WeightsReference(
        uri=str(target), format=WeightsFormat.HUGGINGFACE, sha256=sha256, bytes=len(new), files=files
    )
    return reference, new


def random_numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def reference(directory: Path, form: WeightsFormat = WeightsFormat.HUGGINGFACE) -> WeightsReference:
    """Return the reference of a directory as a trainer would send it now."""
    contents = {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*.*")}
    weights = b"".join(contents[name] for name in sorted(contents) if name.endswith(".safetensors"))
    return WeightsReference(
        uri=str(directory),
        format=form,
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights),
        files={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
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
