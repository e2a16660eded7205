"""The kinds of judges, by their names in `[run.judges.NAME] kind`."""

from __future__ import annotations

from proxy.judges.kinds.base import Kind
from proxy.judges.kinds.follow_up import FollowUp
from proxy.judges.kinds.pairwise import Pairwise
from proxy.judges.kinds.python import Python
from proxy.judges.kinds.relative import Relative
from proxy.judges.kinds.rubric import Rubric
from proxy.judges.kinds.verifier import Verifier
from proxy.settings import JudgeKind

KINDS: dict[JudgeKind, Kind] = {
    JudgeKind.RUBRIC: Rubric(),
    JudgeKind.RELATIVE: Relative(),
    JudgeKind.PAIRWISE: Pairwise(),
    JudgeKind.FOLLOW_UP: FollowUp(),
    JudgeKind.VERIFIER: Verifier(),
    JudgeKind.PYTHON: Python(),
}
"""Stateless: everything that a judge needs comes with its subject and its tools."""
