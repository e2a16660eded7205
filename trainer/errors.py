"""Every error of the trainer.

TrainerError
├── ConfigurationError   the configuration is wrong; the message names the key and what it accepts
├── UserFunctionFailed   a function of the user's raised, or returned what it must not; the message says where
├── UnsupportedModel     the model cannot be trained rightly here; the message says what was found
├── WeightsUnusable      a version's directory is missing, incomplete or not what was committed
├── TeacherUnusable      the teacher's engine refuses what it is asked, or answers something else
├── TeacherSilent        the teacher's engine has not answered for as long as one may wait
├── NothingToFit         there is nothing to fit to, or not what was asked for; the message says what was found
├── ReplayImpossible     a past step cannot be made again; the message says what is missing and what to do
├── MemoryExhausted      a step does not fit into memory, however it is divided; the message says what to do
├── RanksStartAgain      a step does not fit into a rank's memory; its launcher starts all ranks once more
├── ProxyRefused         the proxy answered and will answer the same again: key, run or request are wrong
│   └── RunArchived      the run was archived, and is not trained until it is unarchived
├── ProxySilent          a request that is not retried, or was for as long as one may wait, got no answer
└── Superseded           what the trainer was working on is no longer its own; it reloads the head and goes on
    ├── HeadMoved        the run's head is another version than the one trained from
    ├── StepTooLarge     a step did not fit into memory: it is made again in smaller parts
    └── ClaimLost        a lease ended: its trajectories went back and will be claimed again
"""

from __future__ import annotations


class TrainerError(Exception):
    """The root of the trainer's errors."""


class ConfigurationError(TrainerError):
    pass


class UserFunctionFailed(TrainerError):
    pass


class UnsupportedModel(TrainerError):
    pass


class WeightsUnusable(TrainerError):
    pass


class TeacherUnusable(TrainerError):
    pass


class TeacherSilent(TrainerError):
    pass


class NothingToFit(TrainerError):
    pass


class ReplayImpossible(TrainerError):
    pass


class MemoryExhausted(TrainerError):
    pass


class RanksStartAgain(TrainerError):
    pass


class ProxyRefused(TrainerError):
    pass


class RunArchived(ProxyRefused):
    pass


class ProxySilent(TrainerError):
    pass


class Superseded(TrainerError):
    pass


class HeadMoved(Superseded):
    pass


class StepTooLarge(Superseded):
    pass


class ClaimLost(Superseded):
    pass
