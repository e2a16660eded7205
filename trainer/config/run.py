"""The settings of one run."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, SecretStr, model_validator

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
from trainer.config.weights import DiskWeights
from trainer.user_code import without_directories

OF_THE_PROCESS = ("name", "device", "nproc", "threads", "log_level")
"""The same for all runs that one trainer trains."""

_NOT_PART_OF_THE_MATHEMATICS = {
    "proxy_url",
    "api_key",
    "run",
    "name",
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
    """Everything the trainer can be told about one run. Build it with `load_settings`, or `load_runs`."""

    proxy_url: str = "http://127.0.0.1:8080"
    api_key: SecretStr = SecretStr("")
    run: str = "policy"
    name: str = "trainer"
    """Who claims, as the proxy shows it."""
    backend: Literal["fsdp", "archon"] = "fsdp"
    """Whose definition of the model: transformers' (any architecture), or our own (`models/archon`)."""
    layout: str | None = None
    """How archon's ranks divide a model (`parallel/layout.py`); None: as shards, each rank with its own rows. Without
    a `backend` it is archon."""
    pipeline_schedule: PipelineSchedule | None = None
    """Of a layout with `p`; None: 1f1b."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Precision = Precision.FLOAT32
    head_precision: Precision | None = None
    """What the output head multiplies in. None: float32, but on CUDA the model's `precision`."""
    attention: Attention = Attention.AUTO
    """In trees; on CUDA in packed rows too."""
    compile: bool = False
    """archon: layers are compiled by torch.compile, but for attention itself and for experts."""
    activation_checkpointing: bool = False
    offload: bool = False
    """Weights, gradients and optimiser state are in the CPU's memory, and a layer's weights on the GPU while it
    computes; AdamW steps on the CPU."""
    seed: NonNegativeInt = 0
    nproc: PositiveInt | None = None
    """Processes that train together; None: as many as there are. `base-rl up` and `base-rl train` start them, as many
    as the layout is for where this is None."""
    threads: PositiveInt | None = None
    """CPU threads of torch; None: torch decides."""
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
    weights: DiskWeights = DiskWeights()
    metrics: MetricsSettings = MetricsSettings()
    profile: ProfileSettings = ProfileSettings()

    @model_validator(mode="before")
    @classmethod
    def _archon_for_a_layout(cls, values: Any) -> Any:
        """Where no backend is named, a layout names it."""
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
        """Return all that the new weights depend on, as JSON: without addresses, keys and names, and with the SHA-256
        of the files of the user's own functions."""
        values = self.model_dump(mode="json", exclude=_NOT_PART_OF_THE_MATHEMATICS)
        values["algorithm"] = without_directories(values["algorithm"])
        if values["adapter"] is not None:
            del values["adapter"]["publish"]
        return values

    def config_hash(self) -> str:
        """SHA-256 of the mathematics."""
        return hashlib.sha256(json.dumps(self.mathematics(), sort_keys=True).encode()).hexdigest()
