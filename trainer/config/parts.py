"""The choices for each part of an algorithm."""

from __future__ import annotations

from enum import StrEnum


class Baseline(StrEnum):
    """The baseline that is subtracted from a session's reward; with `critic`, from the rewards that follow each
    token."""

    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    BATCH_MEAN = "batch_mean"
    RUNNING_MEAN = "running_mean"
    CRITIC = "critic"
    NONE = "none"


class Scale(StrEnum):
    """The scale that the difference to the baseline is divided by."""

    GROUP_STD = "group_std"
    BATCH_STD = "batch_std"
    RUNNING_STD = "running_std"
    TOKEN_STD = "token_std"  # noqa: S105 - a scale, no secret
    """Over all tokens of the batch, which are centred as well (`algorithm/whitening.py`)."""
    NONE = "none"


class Surrogate(StrEnum):
    """The term of the policy loss for a token or an answer (`algorithm/losses.py`)."""

    RATIO = "ratio"
    CLIP = "clip"
    SEQUENCE_CLIP = "sequence_clip"
    TRUNCATED = "truncated"
    GATED = "gated"


class Proximal(StrEnum):
    """The proximal policy: the weights at the start of the step, an interpolation between these and the behaviour
    policy, or the behaviour policy itself."""

    RECOMPUTE = "recompute"
    LOGLINEAR = "loglinear"
    BEHAVIOUR = "behaviour"


class Correction(StrEnum):
    """The weight of a token that corrects for the difference between the trained policy and the behaviour policy
    (`algorithm/correction.py`)."""

    NONE = "none"
    TRUNCATE = "truncate"
    SIGNED_TRUNCATE = "signed_truncate"
    MASK = "mask"
    SEQUENCE_TRUNCATE = "sequence_truncate"
    SEQUENCE_MASK = "sequence_mask"
    GEOMETRIC_MASK = "geometric_mask"


class Denominator(StrEnum):
    """The count that the summed loss is divided by, over everything that one optimiser step learns from: trained
    tokens, sequences, answers that are each a mean over their tokens, or answers times a constant length."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    ANSWERS = "answers"
    CONSTANT = "constant"


class Divergence(StrEnum):
    """An estimate of the policy's divergence from its reference (`algorithm/divergence.py`). k1 is subtracted from
    each token's advantage; k2 and k3 are added to the loss."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class TaskBy(StrEnum):
    """Which sessions share the running estimates of a task (`algorithm/running.py`).

    - `name`: those that name the same task.
    - `first_message`: also those that name none, if the first message of their user is the same.
    """

    NAME = "name"
    FIRST_MESSAGE = "first_message"


class Truncated(StrEnum):
    """The treatment of answers that were cut by a bound or by the client (`batching/answers.py`).

    - `mask`: their tokens are not trained.
    - `drop`: their whole trajectory is not trained, and its reward is not compared with others.
    - `zero_reward`: they are trained, and their session's reward counts as 0.
    - `train`: they are trained like complete answers.
    """

    MASK = "mask"
    DROP = "drop"
    ZERO_REWARD = "zero_reward"
    TRAIN = "train"


class TruncatedSampling(StrEnum):
    """The treatment of answers that were drawn with top-p, top-k or min-p (`batching/answers.py`).

    The engine does not report how much of the distribution was left, so no weight corrects for it.

    - `mask`: their tokens are not trained.
    - `train`: they are trained as if the distribution had not been cut.
    """

    MASK = "mask"
    TRAIN = "train"


class PreferenceForm(StrEnum):
    """The loss of a pair of which one side was preferred (`algorithm/preferences.py`)."""

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    IPO = "ipo"
