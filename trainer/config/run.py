"""The settings of one run."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, SecretStr, model_validator

from trainer.config.algorithm import AlgorithmSettings
from trainer.config.batch import BatchSettings
from trainer.config.models import (
    AdapterSettings,
    Attention,
    PipelineSchedule,
    Precision,
    ReferenceSettings,
    TeacherSettings,
)
from trainer.config.observation import AuditSettings, MetricsSettings, MismatchSettings, ProfileSettings
from trainer.config.optimizer import OptimizerSettings
from trainer.config.section import Section
from trainer.config.weights import DiskWeights, Weights
from trainer.user_code import without_directories

OF_THE_PROCESS = ("name", "device", "nproc", "threads", "log_level")
"""Settings of the process, which are the same for all runs that it trains."""

_NOT_PART_OF_THE_MATHEMATICS = {
    "proxy_url",
    "api_key",
    "run",
    "name",
    "weight",
    "nproc",
    "threads",
    "log_level",
    "audit",
    "mismatch",
    "teacher",
    "weights",
    "metrics",
    "profile",
}


class TrainerSettings(Section):
    """All settings of one run. Build them with `load_settings` or `load_runs`."""

    proxy_url: str = "http://127.0.0.1:8080"
    api_key: SecretStr = SecretStr("")
    run: str = "policy"
    name: str = "trainer"
    """Name of the trainer in the proxy's list of claims."""
    backend: Literal["fsdp", "archon"] = "fsdp"
    """Definition of the model: that of transformers (any architecture), or the trainer's own (`models/archon`)."""
    layout: str | None = None
    """Division of the model among the ranks with archon (`parallel/layout.py`); None: sharded, and each rank trains
    rows of its own. A layout implies `backend` = archon."""
    pipeline_schedule: PipelineSchedule | None = None
    """Schedule of a layout with `p` (pipeline stages); None: 1f1b."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = Precision.FLOAT32
    head_precision: Precision | None = None
    """Precision of the output head. None: float32, but the model's `precision` on CUDA."""
    attention: Attention = Attention.AUTO
    """How attention is computed in trees, and on CUDA in packed rows too."""
    compile: bool = False
    """With archon: layers are compiled by torch.compile, except attention and experts."""
    activation_checkpointing: bool = False
    offload: bool = False
    """Keep weights, gradients and optimiser state in CPU memory, and a layer's weights on the GPU only while it
    computes. AdamW then steps on the CPU."""
    seed: NonNegativeInt = 0
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Of several runs on one trainer: this run's share of the time, in proportion to the weights of the others."""
    nproc: PositiveInt | None = None
    """Processes that train together. None: as many as were started; `base-rl up` and `base-rl train` start the
    number that the layout needs."""
    threads: PositiveInt | None = None
    """CPU threads of torch; None: torch's default."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    batch: BatchSettings = BatchSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    reference: ReferenceSettings = ReferenceSettings()
    adapter: AdapterSettings | None = None
    """None: all weights are trained."""
    mismatch: MismatchSettings = MismatchSettings()
    audit: AuditSettings = AuditSettings()
    teacher: TeacherSettings = TeacherSettings()
    weights: Weights = DiskWeights()
    metrics: MetricsSettings = MetricsSettings()
    profile: ProfileSettings = ProfileSettings()

    @model_validator(mode="before")
    @classmethod
    def _archon_for_a_layout(cls, values: Any) -> Any:
        """Set the backend to archon if a layout is given without a backend."""
        if isinstance(values, dict) and values.get("layout") is not None and "backend" not in values:
            return {**values, "backend": "archon"}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> TrainerSettings:
        if self.backend != "archon" and self.layout is not None:
            raise ValueError(
                f'layout belongs to backend = "archon", and the backend is "{self.backend}"; leave one of them out'
            )
        if self.backend != "archon" and self.compile:
            raise ValueError(f'compile belongs to backend = "archon", and the backend is "{self.backend}"')
        if self.compile and self.pipeline_schedule is PipelineSchedule.ZBV:
            raise ValueError(
                "compile and pipeline_schedule = zbv do not go together: a compiled layer computes the gradients of"
                " its weights and of what it reads at once, and zbv computes them apart; leave one of them out"
            )
        if self.precision is Precision.FLOAT32 and self.head_precision is Precision.BFLOAT16:
            raise ValueError(
                "head_precision = bfloat16 needs precision = bfloat16: the head of a float32 model is in float32"
            )
        if self.backend != "archon" and self.algorithm.router_aux_coefficient:
            raise ValueError(
                'algorithm.router_aux_coefficient is for mixtures of experts, which need backend = "archon"; the'
                f' backend is "{self.backend}"'
            )
        if self.backend != "fsdp" and self.offload:
            raise ValueError(f'offload belongs to backend = "fsdp", and the backend is "{self.backend}"')
        if self.backend != "fsdp" and self.adapter is not None:
            raise ValueError(f'an adapter belongs to backend = "fsdp", and the backend is "{self.backend}"')
        return self

    def mathematics(self) -> dict[str, Any]:
        """Return everything that the new weights depend on, as JSON: without addresses, keys and names, and with the
        SHA-256 of the files of the user's own functions."""
        values = self.model_dump(mode="json", exclude=_NOT_PART_OF_THE_MATHEMATICS)
        values["algorithm"] = without_directories(values["algorithm"])
        if values["adapter"] is not None:
            del values["adapter"]["publish"]
        return values

    def config_hash(self) -> str:
        """Return the SHA-256 of `mathematics`."""
        return hashlib.sha256(json.dumps(self.mathematics(), sort_keys=True).encode()).hexdigest()
