"""The trainer's configuration: the `[trainer]` section of a run's TOML file.

Precedence: command line > environment (`BASE_RL_TRAINER__SECTION__KEY`) > file > defaults. Unknown keys are refused.
The run's name, the proxy's address and the directories follow the proxy's own sections (`[run] name`, `[server]
public_url` and `data_dir`) where the trainer's section does not name them. The parts of the algorithm that are not
given are those of its preset (`trainer/algorithm/presets.py`).

`[trainer.runs.NAME]` sections make one trainer train several runs: each says what is different for its run.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    Tag,
    ValidationError,
    model_validator,
)

from trainer.errors import ConfigurationError
from trainer.user_code import FunctionInFile, anchored, without_directories

ENVIRONMENT_PREFIX = "BASE_RL_"
SECTION = "trainer"
RUNS = "runs"

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


class Baseline(StrEnum):
    """What is subtracted from a session's reward; with `critic`, from what comes after each token."""

    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH_MEAN = "batch_mean"
    RUNNING_MEAN = "running_mean"
    CRITIC = "critic"
    NONE = "none"


class Scale(StrEnum):
    """What the difference to the baseline is divided by."""

    GROUP_STD = "group_std"
    BATCH_STD = "batch_std"
    RUNNING_STD = "running_std"
    TOKEN_STD = "token_std"  # noqa: S105 - a scale, no secret
    """Over all tokens of the batch, which are centred as well (`algorithm/whitening.py`)."""
    NONE = "none"


class Surrogate(StrEnum):
    """What stands in the loss for the policy's improvement on a token, or on an answer (`algorithm/losses.py`)."""

    RATIO = "ratio"
    CLIP = "clip"
    SEQUENCE_CLIP = "sequence_clip"
    TRUNCATED = "truncated"
    GATED = "gated"


class Proximal(StrEnum):
    """Where the proximal policy comes from: the weights at the start of the step, an interpolation, or the behaviour
    policy in its place."""

    RECOMPUTE = "recompute"
    LOGLINEAR = "loglinear"
    BEHAVIOUR = "behaviour"


class Correction(StrEnum):
    """How the weight of a token corrects for the difference between the policy that is trained and the one that drew
    it (`algorithm/correction.py`)."""

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"
    SEQUENCE_TRUNCATE = "sequence_truncate"
    SEQUENCE_MASK = "sequence_mask"
    GEOMETRIC_MASK = "geometric_mask"


class Denominator(StrEnum):
    """What the summed loss is divided by, counted over all that one optimiser step learns from: trained tokens,
    sequences, answers that each are a mean over their tokens, or answers times a constant length."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    ANSWERS = "answers"
    CONSTANT = "constant"


class Divergence(StrEnum):
    """An estimate of the policy's divergence from its reference (`algorithm/divergence.py`), where it does what it is
    for: k1 is taken from each token's advantage, k2 and k3 are added to the loss."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Truncated(StrEnum):
    """How answers that did not end by themselves are trained (`batching/answers.py`).

    `mask`: their tokens are not. `drop`: their whole trajectory is not, nor is its reward compared with others'.
    `zero_reward`: they are, and their session's reward counts as 0. `train`: they are, as whole answers are.
    """

    MASK = "mask"
    DROP = "drop"
    ZERO_REWARD = "zero_reward"
    TRAIN = "train"


class TruncatedSampling(StrEnum):
    """The use of answers that were drawn with top-p, top-k or min-p (`batching/answers.py`).

    The engine does not say how much of the distribution was left, so no weight corrects for it. `mask`: their tokens
    are not trained. `train`: they are, as if nothing had been cut.
    """

    MASK = "mask"
    TRAIN = "train"


class FilterAction(StrEnum):
    """What happens to an answer that a filter catches: it is masked, or its whole trajectory is dropped."""

    MASK = "mask"
    DROP = "drop"


class PreferenceForm(StrEnum):
    """How a pair of which one side was preferred becomes a loss (`algorithm/preferences.py`)."""

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    IPO = "ipo"


class Packing(StrEnum):
    """The layout of sequences in rows (`batching/packing.py`): one in a row, several in a row, or every prefix that
    some of them share once."""

    PADDED = "padded"
    PACKED = "packed"
    TREE = "tree"


class Precision(StrEnum):
    """What forward and backward compute in. Weights, gradients and optimiser state are float32 in both."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """How attention under a mask is computed (`models/attention.py`): whole; by those blocks of it in which something
    is seen; or by blocks where the model can."""

    AUTO = "auto"
    WHOLE = "whole"
    BLOCKS = "blocks"


class PipelineSchedule(StrEnum):
    """In which order the stages of a pipeline compute micro-batches (`parallel/pipeline.py`)."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZBV = "zbv"


class SinkName(StrEnum):
    """Where the metrics of steps go besides the store: packages that are installed by an extra of the same name."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


CLEARED = "none"
"""Written for an option that a preset, another layer or the defaults would set: it has no value."""
_NUMBER = "number"


def is_cleared(value: object) -> bool:
    """Tell the text "none" from members of enumerations, some of which equal it."""
    return type(value) is str and value == CLEARED


def _tag(value: object) -> str:
    return CLEARED if is_cleared(value) else _NUMBER


def _without_cleared(value: object) -> object:
    return None if is_cleared(value) else value


_Clearable = BeforeValidator(_without_cleared)
"""For options whose default is None: "none" is None, so that a file or the environment can say so."""
_Cleared = Annotated[Literal["none"], Tag(CLEARED)]
_PositivePart = Annotated[Annotated[PositiveFloat, Tag(_NUMBER)] | _Cleared, Discriminator(_tag)]
_AboveOnePart = Annotated[Annotated[float, Field(gt=1), Tag(_NUMBER)] | _Cleared, Discriminator(_tag)]
"""Parts of an algorithm where None means the preset's value, and "none" no value."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchSettings(_Section):
    """What one step takes."""

    trajectories: PositiveInt = 128
    """About how many trajectories a step waits for; whole groups, so it may be a few more."""
    at_least: PositiveInt = 2
    """After `wait_seconds`, a step is made of what is there if it is this many."""
    wait_seconds: Annotated[float, Field(gt=0, le=60)] = 30.0
    max_staleness: NonNegativeInt = 4
    """Versions between a token's policy and the head beyond which its trajectory is not trained; 0: synchronous."""
    packing: Packing = Packing.TREE
    """A model that does not take this layout gets `padded`."""
    row_tokens: Annotated[PositiveInt | None, _Clearable] = None
    """`packed`: rows of this many tokens; a longer sequence gets a row of its own. None: 512, or
    `max_tokens_per_microbatch` if that is less."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Rows times their length, padding included, in one forward and backward; one row at least."""

    def taken_by(self, packings: Collection[Packing]) -> BatchSettings:
        """The same for a model that takes these packings, of which `padded` is one."""
        return self if self.packing in packings else self.model_copy(update={"packing": Packing.PADDED})

    @property
    def packed_row_tokens(self) -> int:
        return self.row_tokens or min(512, self.max_tokens_per_microbatch)

    @model_validator(mode="after")
    def _consistent(self) -> BatchSettings:
        if self.at_least > self.trajectories:
            raise ValueError(f"at_least ({self.at_least}) cannot exceed trajectories ({self.trajectories})")
        if self.row_tokens is not None and self.packing is not Packing.PACKED:
            raise ValueError(
                f"row_tokens ({self.row_tokens}) is of rows that sequences are packed into, which packing ="
                f" {self.packing.value} does not do; leave it out, or set packing = packed"
            )
        if self.row_tokens is not None and self.row_tokens > self.max_tokens_per_microbatch:
            raise ValueError(
                f"row_tokens ({self.row_tokens}) cannot exceed max_tokens_per_microbatch"
                f" ({self.max_tokens_per_microbatch})"
            )
        return self


class RewardSettings(_Section):
    """The reward that the algorithm sees: `scale × (clip(r, low, high) + bias)`, for sessions and turns alike."""

    low: Annotated[float | None, _Clearable] = None
    high: Annotated[float | None, _Clearable] = None
    bias: float = 0.0
    scale: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> RewardSettings:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class FilterSettings(_Section):
    """Bounds beyond which an answer counts as repetitive or as gibberish (`batching/filters.py`); None: no bound."""

    repeated_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """An answer is repetitive if a larger share of its n-grams stands earlier in it as well."""
    repeated_ngram: Annotated[int, Field(ge=1, le=64)] = 8
    """The n of these n-grams, in tokens."""
    certain_tokens: PositiveInt | None = None
    """An answer is repetitive if so many consecutive tokens were each drawn with more than `certain_probability`."""
    certain_probability: Annotated[float, Field(gt=0, lt=1)] = 0.99
    gibberish_logprob: Annotated[float, Field(lt=0)] | None = None
    """An answer is gibberish if the mean log-probability of `gibberish_window` consecutive tokens is lower."""
    gibberish_window: PositiveInt = 32
    action: FilterAction = FilterAction.MASK

    @property
    def is_on(self) -> bool:
        bounds = (self.repeated_share, self.certain_tokens, self.gibberish_logprob)
        return any(bound is not None for bound in bounds)

    @model_validator(mode="after")
    def _consistent(self) -> FilterSettings:
        needs = {
            "repeated_ngram": self.repeated_share is not None,
            "certain_probability": self.certain_tokens is not None,
            "gibberish_window": self.gibberish_logprob is not None,
            "action": self.is_on,
        }
        bounds = {
            "repeated_ngram": "repeated_share",
            "certain_probability": "certain_tokens",
            "gibberish_window": "gibberish_logprob",
            "action": "one of repeated_share, certain_tokens and gibberish_logprob",
        }
        for name, is_used in needs.items():
            if not is_used and getattr(self, name) != FilterSettings.model_fields[name].default:
                raise ValueError(f"{name} changes nothing without a bound: set {bounds[name]}, or leave it out")
        return self


class AlgorithmSettings(_Section):
    """A preset and what to change in it. A part that is not given is the preset's; "none" clears one."""

    preset: str = "grpo"
    loss: FunctionInFile | None = None
    advantage: FunctionInFile | None = None
    filter: FunctionInFile | None = None
    surrogate: Surrogate | None = None
    baseline: Baseline | None = None
    scale: Scale | None = None
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_high: PositiveFloat | None = None
    dual_clip: _AboveOnePart | None = None
    gate_positive: PositiveFloat | None = None
    gate_negative: PositiveFloat | None = None
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    correction: Correction | None = None
    correction_low: Annotated[float, Field(ge=0, le=1)] | None = None
    correction_high: Annotated[float, Field(ge=1)] | None = None
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    proximal: Proximal | None = None
    second_moment: _PositivePart | None = None
    denominator: Denominator | None = None
    constant_tokens: PositiveInt | None = None
    drop_degenerate: bool | None = None
    fill: bool | None = None
    mini_batches: Annotated[int, Field(ge=1, le=64)] | None = None
    kl_coefficient: NonNegativeFloat | None = None
    kl_form: Divergence | None = None
    entropy_coefficient: NonNegativeFloat | None = None
    router_aux_coefficient: NonNegativeFloat | None = None
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] | None = None
    rl_coefficient: NonNegativeFloat | None = None
    distill_coefficient: NonNegativeFloat | None = None
    turn_discount: Annotated[float, Field(gt=0, le=1)] | None = None
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    discount: Annotated[float, Field(gt=0, le=1)] | None = None
    value_clip: _PositivePart | None = None
    critic_rate: PositiveFloat | None = None
    critic_warmup: NonNegativeInt | None = None
    running_mean_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    overlong_factor: NonNegativeFloat | None = None
    overlong_tokens: PositiveInt | None = None
    overlong_tail: PositiveInt | None = None
    truncated: Truncated | None = None
    truncated_sampling: TruncatedSampling | None = None
    reward: RewardSettings = RewardSettings()
    filters: FilterSettings = FilterSettings()

    @property
    def learns_entropy(self) -> bool:
        """Whether the loss may have a gradient through the policy's entropies. No preset has one by itself."""
        return bool(self.entropy_coefficient) or self.loss is not None


class ReferenceSettings(_Section):
    """What the policy is held to where `kl_coefficient` is above 0. Neither chosen: the base model, for ever."""

    reset_every: PositiveInt | None = None
    """Optimiser steps after which the reference becomes the policy as it then is."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The reference is an average of the policy: each optimiser step leaves it this share of itself."""

    @property
    def follows(self) -> bool:
        """Whether the reference moves with the policy."""
        return self.reset_every is not None or self.ema is not None

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceSettings:
        if self.reset_every is not None and self.ema is not None:
            raise ValueError("reset_every and ema are two ways to move the reference; leave one of them out")
        return self


class LearningRate(StrEnum):
    """How the learning rate goes down behind the warm-up: not at all, along a line, or along half a cosine."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OptimizerSettings(_Section):
    """AdamW with a linear warm-up and, by choice, a learning rate that goes down behind it."""

    learning_rate: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    """The first step that has the whole learning rate is this one; 0 and 1 mean no warm-up."""
    schedule: LearningRate = LearningRate.CONSTANT
    total_steps: PositiveInt | None = None
    """Optimiser steps, counted from version 0, after which the rate stays at its minimum. None: a `fit`'s own number
    of steps; a trainer, which has no last step, must be given one."""
    minimum_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """The least learning rate, as a share of the whole."""
    clip_norm: PositiveFloat = 1.0
    skip_norm: Annotated[PositiveFloat | None, _Clearable] = None
    """A gradient of a larger norm is not learnt from at all, as one that is not finite; None: any finite one is."""
    pause_after: PositiveInt = 3
    """Batches in a row without a gradient to learn from, after which the trainer pauses the run."""

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerSettings:
        if self.schedule is LearningRate.CONSTANT:
            for option in ("total_steps", "minimum_share"):
                # By value: a step's record, which replay reads, gives every option.
                if getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(
                        f"{option} says how the learning rate goes down, which schedule = constant does not; set"
                        " schedule to linear or cosine, or leave it out"
                    )
        elif self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be below total_steps ({self.total_steps}): the rate goes"
                " down behind the warm-up"
            )
        return self

    def check_end(self) -> None:
        """Raise ConfigurationError if the learning rate of a trainer goes down without a step to be down at."""
        if self.schedule is not LearningRate.CONSTANT and self.total_steps is None:
            raise ConfigurationError(
                f"trainer.optimizer.total_steps: schedule = {self.schedule.value} needs it: how many optimiser steps"
                " the run will take; a trainer does not stop by itself"
            )


class AdapterPublish(StrEnum):
    """What a version's directory holds: the adapter alone, or whole weights with the adapter merged into them, which
    every engine serves, and the adapter beside."""

    ADAPTER = "adapter"
    MERGED = "merged"


class AdapterSettings(_Section):
    """LoRA: the base model's weights stay as they are, and a low-rank difference to them is trained."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The difference is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of what the adapter reads, in passes that learn."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of linear layers, or ends of them; "all-linear": all but the output head."""
    publish: AdapterPublish = AdapterPublish.ADAPTER


class MismatchSettings(_Section):
    """Bounds on how far the engine's log-probabilities may be from the trainer's at one version (`watch.py`)."""

    warn_above: NonNegativeFloat = 0.1
    """Nats: mean absolute difference over the tokens of the head's own version; 0: no warning."""
    pause_above: NonNegativeFloat = 0.5
    """Nats, of the same mean; 0: the run is not paused."""
    steps: PositiveInt = 3
    """Steps in a row above a bound, after which it acts."""

    @model_validator(mode="after")
    def _consistent(self) -> MismatchSettings:
        if self.pause_above and self.warn_above > self.pause_above:
            raise ValueError(
                f"warn_above ({self.warn_above}) cannot exceed pause_above ({self.pause_above}), or the run is paused"
                " before anything is said"
            )
        return self


class AuditSettings(_Section):
    """What is kept of a step to explain it, besides the figures of each trajectory."""

    sample: Annotated[int, Field(ge=0, le=256)] = 4
    """Of this many trajectories a step, every trained token: the one whose log-probabilities differ most from the
    engine's, and others by chance."""


class TeacherSettings(_Section):
    """An engine that serves another model, which the policy learns from where `distill_coefficient` is above 0."""

    url: str | None = None
    """Its address; it speaks as SGLang does."""
    api_key: SecretStr = SecretStr("")
    tokenizer: Path | None = None
    """A directory with its tokenizer.json; None: where the engine says that its model is."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Sequences that it is asked about at a time."""
    timeout_seconds: PositiveFloat = 300.0


class DiskWeights(_Section):
    """Versions are directories on storage that the proxy and its engines read under the same path."""

    type: Literal["disk"] = "disk"
    directory: Path = Path(".base-rl/weights")
    keep_optimizer_states: PositiveInt = 2
    """Optimiser states of this many newest versions are kept."""
    keep_versions: Annotated[PositiveInt | None, _Clearable] = None
    """Weights of this many newest versions are kept, those that serve or have an optimiser state besides; None: all.
    """


class WandbSettings(_Section):
    """Weights & Biases; its key is where `wandb login` or WANDB_API_KEY left it."""

    entity: str | None = None
    """The user or team; None: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """Offline: into files, which `wandb sync` sends later."""


class MlflowSettings(_Section):
    tracking_uri: str | None = None
    """None: MLFLOW_TRACKING_URI, or an SQLite file in the sinks' directory."""


class MetricsSettings(_Section):
    """Where the metrics of steps go besides the store and Prometheus. What one of these does, or does not do, never
    keeps the trainer waiting."""

    sinks: tuple[SinkName, ...] = ()
    directory: Path = Path(".base-rl/metrics")
    """Files of theirs: one directory per sink."""
    project: Annotated[str, Field(min_length=1)] = "base-rl"
    """The project in W&B and Trackio, the experiment in MLflow."""
    wandb: WandbSettings = WandbSettings()
    mlflow: MlflowSettings = MlflowSettings()

    @model_validator(mode="after")
    def _consistent(self) -> MetricsSettings:
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError("sinks names one twice")
        for sink in (SinkName.WANDB, SinkName.MLFLOW):
            if sink.value in self.model_fields_set and sink not in self.sinks:
                raise ValueError(f"{sink.value} is set up, and is not one of sinks")
        if "project" in self.model_fields_set and not set(self.sinks) - {SinkName.TENSORBOARD}:
            raise ValueError("project is for wandb, mlflow and trackio, none of which is one of sinks")
        return self


class ProfileSettings(_Section):
    """A trace of some steps by torch's profiler."""

    steps: Annotated[int, Field(ge=0, le=100)] = 0
    """How many steps; 0: none."""
    first: PositiveInt = 2
    """The first of them, counted from the trainer's start; the very first step does much that no other does."""
    directory: Path = Path(".base-rl/profiles")


class TrainerSettings(_Section):
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


def load_settings(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainerSettings:
    """Reads file and environment (default: the process's own) and lays `overrides` (a nested mapping) over both. What
    they say of `run` alone, in its section of `runs`, goes before what they say of all.

    Raises ConfigurationError with one line per wrong key.
    """
    values, runs, _ = _layered(config_file, overrides, environment)
    name = values.get("run", TrainerSettings.model_fields["run"].default)
    lines: list[str] = []
    settings = _settings_of(name, values, runs.get(name, {}), lines) if isinstance(name, str) else None
    if settings is None:
        raise ConfigurationError("\n".join(lines) or f"{SECTION}.run: Input should be a valid string")
    return settings


def load_runs(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
) -> dict[str, TrainerSettings]:
    """Of each run to train, by the name of its section: `only` these, or all in `runs`, or, without such sections,
    `run`.

    Raises ConfigurationError with one line per wrong key.
    """
    values, runs, told = _layered(config_file, overrides, environment)
    if not only and not runs:
        alone = load_settings(config_file, overrides, environment)
        return {alone.run: alone}
    lines: list[str] = []
    found = {
        name: _settings_of(name, {**values, "run": name}, runs.get(name, {}), lines) for name in only or tuple(runs)
    }
    if lines:
        raise ConfigurationError("\n".join(dict.fromkeys(lines)))
    settings = {name: each for name, each in found.items() if each is not None}
    if not only and told is not None and all(each.run != told for each in settings.values()):
        raise ConfigurationError(
            f"{SECTION}.run: {told!r} is not one of {SECTION}.{RUNS} ({', '.join(runs)}): give it a section there, or"
            " leave it out"
        )
    _check_apart(settings)
    return settings


def _layered(
    config_file: Path | None, overrides: Mapping[str, Any] | None, environment: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]], str | None]:
    """What is said of all runs, what is said of each, and the `run` that the trainer's own section names."""
    environment = os.environ if environment is None else environment
    file = _read(config_file) if config_file is not None else {}
    values = _followed(file, environment)
    section = file.get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{SECTION}: must be a section, [{SECTION}]")
    if config_file is not None:
        section = anchored(section, config_file.absolute().parent)
    told = None
    for layer in (section, _from_environment(environment), overrides or {}):
        values, told = merge(values, layer), layer.get("run", told)
    runs = values.pop(RUNS, {})
    if not isinstance(runs, dict):
        raise ConfigurationError(f"{SECTION}.{RUNS}: write a section for each run, [{SECTION}.{RUNS}.NAME]")
    for name, own in runs.items():
        if not isinstance(own, dict):
            raise ConfigurationError(f"{SECTION}.{RUNS}.{name}: must be a section, [{SECTION}.{RUNS}.{name}]")
    return values, runs, told


def _settings_of(
    name: str, values: Mapping[str, Any], own: Mapping[str, Any], lines: list[str]
) -> TrainerSettings | None:
    """What is said of all runs with what is said of this one laid over. None where it is wrong: `lines` say how."""
    place = f"{SECTION}.{RUNS}.{name}"
    lines += [f"{place}.{key}: is the same for all runs; set {SECTION}.{key}" for key in own if key in OF_THE_PROCESS]
    everybodys = values.get("proxy_url", TrainerSettings.model_fields["proxy_url"].default)
    theirs = own.get("proxy_url", everybodys)
    if theirs != everybodys and "api_key" not in own:
        lines.append(f"{place}.api_key: must be given, as {SECTION}.api_key is for {everybodys}, not for {theirs}")
    try:
        return TrainerSettings.model_validate(merge(values, own))
    except ValidationError as error:
        lines += _described(error, own, place)
        return None


def _check_apart(runs: Mapping[str, TrainerSettings]) -> None:
    """Raises ConfigurationError where two are the same one."""
    seen: dict[tuple[str, str], str] = {}
    for name, settings in runs.items():
        other = seen.setdefault((settings.proxy_url.rstrip("/"), settings.run), name)
        if other != name:
            raise ConfigurationError(
                f"{SECTION}.{RUNS}.{name}: is {SECTION}.{RUNS}.{other}, the run {settings.run!r} of"
                f" {settings.proxy_url}, once more"
            )


def parse_assignment(text: str) -> dict[str, Any]:
    """`section.key=value` of the command line as a nested mapping. Raises ConfigurationError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigurationError(f"{text!r}: write section.key=value")
    return _nested(key.split("."), _parsed(value))


def _read(config_file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config_file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {config_file}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{config_file} is not valid TOML: {error}") from error


def _followed(file: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The trainer's defaults that the proxy's own sections decide."""

    def proxy_value(section: str, key: str) -> Any:
        in_file = file.get(section)
        default = in_file.get(key) if isinstance(in_file, dict) else None
        return environment.get(f"{ENVIRONMENT_PREFIX}{section}__{key}".upper(), default)

    values: dict[str, Any] = {}
    for section, key, ours in (("run", "name", "run"), ("server", "public_url", "proxy_url")):
        if (value := proxy_value(section, key)) is not None:
            values[ours] = value
    if (data_dir := proxy_value("server", "data_dir")) is not None:
        for section, folder in (("weights", "weights"), ("metrics", "metrics"), ("profile", "profiles")):
            values[section] = {"directory": str(Path(data_dir) / folder)}
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"{ENVIRONMENT_PREFIX}{SECTION}__".upper()
    values: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if name.upper().startswith(prefix):
            values = merge(values, _nested(name[len(prefix) :].lower().split("__"), _parsed(text)))
    return values


def _parsed(text: str) -> Any:
    """Lists, tables and null are JSON; all else stays text, which the types then read."""
    if text == "null" or text[:1] in {"[", "{"}:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _described(error: ValidationError, own: Mapping[str, Any], place: str) -> list[str]:
    """A line per wrong key: of what was said of the run itself at its `place`, else of what is said of all."""
    lines = []
    for detail in error.errors():
        path = [str(part) for part in detail["loc"] if part != _NUMBER]
        is_own = bool(own) and (not path or path[0] in own)
        message = "no such option" if detail["type"] == "extra_forbidden" else detail["msg"]
        lines.append(f"{'.'.join((place if is_own else SECTION, *path))}: {message}")
    return lines
