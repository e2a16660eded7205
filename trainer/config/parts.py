"""The choices of which an algorithm is made."""

from __future__ import annotations

from enum import StrEnum


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


class PreferenceForm(StrEnum):
    """How a pair of which one side was preferred becomes a loss (`algorithm/preferences.py`)."""

    SIGMOID = "sigmoid"
    SIGMOID_NORM = "sigmoid_norm"
    IPO = "ipo"
