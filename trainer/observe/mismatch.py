"""Warnings and pauses for an engine that computes other log-probabilities than the trainer, and warnings of answers
from a distribution that the trainer does not know."""

from __future__ import annotations

import structlog

from proxy.contract.claim import AnswerFault
from trainer.batching.answers import JudgedAnswers
from trainer.claims.leased import LeasedClaims
from trainer.config import MismatchSettings
from trainer.parallel.mesh import Ranks

_log = structlog.get_logger("trainer")


class GapWatch:
    """Counts consecutive steps in which the engine's log-probabilities were far from the trainer's.

    `logprob_gap_fresh` is the mean absolute difference over the tokens of the head's own version. Staleness cannot
    explain it: engine and trainer compute different policies under one version number. Steps without such tokens
    neither count nor end a row. Only the first rank counts, since only it has the figures.
    """

    def __init__(self, ranks: Ranks, claims: LeasedClaims, settings: MismatchSettings) -> None:
        self._ranks = ranks
        self._claims = claims
        self._settings = settings
        self._to_warn = 0
        self._to_pause = 0

    def metrics(self, gap: float | None) -> dict[str, float]:
        """Count a step with this gap (None: unknown), and return the metric by which the proxy reports a problem of
        the run."""
        settings = self._settings
        if gap is not None:
            self._to_warn = _in_a_row(self._to_warn, gap, settings.warn_above)
            self._to_pause = _in_a_row(self._to_pause, gap, settings.pause_above)
        if gap is None or self._to_warn < settings.steps:
            return {}
        _log.warning(
            "engine and trainer disagree: see that the engine serves the weights that it names, and their precision",
            logprob_gap_fresh=gap,
            warn_above=settings.warn_above,
            steps=self._to_warn,
        )
        return {"mismatch_warning": gap}

    def stepped(self, version: int, gap: float | None) -> None:
        """Pause the run if enough steps in a row had too large a gap. `version` has been committed by a step with
        this `gap`. A collective."""
        if self._ranks.from_first(lambda: self._to_pause >= self._settings.steps):
            self._ranks.from_first(lambda: self._pause(version, gap))

    def _pause(self, version: int, gap: float | None) -> None:
        steps, self._to_pause, self._to_warn = self._to_pause, 0, 0
        reason = (
            f"engine and trainer disagree: in {steps} steps in a row, up to version {version}, their"
            " log-probabilities under one version differed by more than trainer.mismatch.pause_above"
            f" ({self._settings.pause_above:g}) nats a token, by {gap or 0.0:.3g} in the last. See that the engine"
            " loads the versions that it names"
            " (base-rl status), and its precision, quantisation and chat template; then resume the run"
        )
        _log.error("pausing the run", reason=reason)
        self._claims.pause_run(reason)


def _in_a_row(count: int, gap: float, bound: float) -> int:
    """Return the number of steps in a row above the bound, including this one. A bound of 0 means none."""
    return count + 1 if bound and gap > bound else 0


def warn_of_cut_sampling(judged: JudgedAnswers) -> None:
    """Warn if answers are not trained because their sampling parameters cut the distribution."""
    reasons = [turn.reason for turns in judged.masked.values() for turn in turns]
    if count := reasons.count(AnswerFault.SAMPLING.value):
        _log.warning(
            "answers drawn with top_p, top_k or min_p are not trained: the engine does not say how much they cut off."
            ' Set run.sampling.mode = "override" to sample from the whole distribution, or'
            ' trainer.algorithm.truncated_sampling = "train" to train them all the same',
            answers=count,
            of=judged.answers,
        )
