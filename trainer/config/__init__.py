"""The trainer's configuration: the `[trainer]` section of a run's TOML file.

Precedence: command line > environment (`BASE_RL_TRAINER__SECTION__KEY`) > the run's settings at its proxy > file >
defaults. Unknown keys are refused.
The run's name, the proxy's address and the directories follow the proxy's own sections (`[run] name`, `[server]
public_url` and `data_dir`) where the trainer's section does not name them. The parts of the algorithm that are not
given are those of its preset (`trainer/algorithm/presets.py`).

`[trainer.runs.NAME]` sections make one trainer train several runs: each gives the settings in which its run differs,
and takes precedence over all of these.
"""

from proxy.contract.configuration import merge
from trainer.config.algorithm import AlgorithmSettings, FilterAction, FilterSettings, RewardSettings
from trainer.config.batch import BatchSettings, Packing
from trainer.config.layers import parse_assignment
from trainer.config.loading import Configuration, load_runs, load_settings
from trainer.config.models import (
    AdapterPublish,
    AdapterSettings,
    Attention,
    PipelineSchedule,
    Precision,
    ReferenceSettings,
    TeacherSettings,
)
from trainer.config.observation import (
    AuditSettings,
    MetricsSettings,
    MismatchSettings,
    MlflowSettings,
    ProfileSettings,
    SinkName,
    WandbSettings,
)
from trainer.config.optimizer import LearningRate, OptimizerSettings
from trainer.config.parts import (
    Baseline,
    Correction,
    Denominator,
    Divergence,
    PreferenceForm,
    Proximal,
    Scale,
    Surrogate,
    TaskBy,
    Truncated,
    TruncatedSampling,
)
from trainer.config.run import OF_THE_PROCESS, TrainerSettings
from trainer.config.section import CLEARED, is_cleared
from trainer.config.weights import (
    CollectiveWeights,
    DeltaWeights,
    DiskWeights,
    SharedDirectory,
    TensorsWeights,
    WeightsDtype,
)

__all__ = [
    "CLEARED",
    "OF_THE_PROCESS",
    "AdapterPublish",
    "AdapterSettings",
    "AlgorithmSettings",
    "Attention",
    "AuditSettings",
    "Baseline",
    "BatchSettings",
    "CollectiveWeights",
    "Configuration",
    "Correction",
    "DeltaWeights",
    "Denominator",
    "DiskWeights",
    "Divergence",
    "FilterAction",
    "FilterSettings",
    "LearningRate",
    "MetricsSettings",
    "MismatchSettings",
    "MlflowSettings",
    "OptimizerSettings",
    "Packing",
    "PipelineSchedule",
    "Precision",
    "PreferenceForm",
    "ProfileSettings",
    "Proximal",
    "ReferenceSettings",
    "RewardSettings",
    "Scale",
    "SharedDirectory",
    "SinkName",
    "Surrogate",
    "TaskBy",
    "TeacherSettings",
    "TensorsWeights",
    "TrainerSettings",
    "Truncated",
    "TruncatedSampling",
    "WandbSettings",
    "WeightsDtype",
    "is_cleared",
    "load_runs",
    "load_settings",
    "merge",
    "parse_assignment",
]
