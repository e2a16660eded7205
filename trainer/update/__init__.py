"""One step over a batch: scores at its start, the loss of each micro-batch, gradients and optimiser steps."""

from trainer.update.learner import Learner
from trainer.update.outcome import Outcome, TokenRecord

__all__ = ["Learner", "Outcome", "TokenRecord"]
