"""The tables of the trajectory store. Times are seconds since the epoch, UTC; ids come from `contract.identifiers`.

Token ids are int32 and log-probabilities float32, little-endian, packed into blobs (`contract/arrays.py`).

Import tables from this package, not from its modules: only then does `Base.metadata` have all of them.
"""

from proxy.database.tables.base import Base, Big
from proxy.database.tables.engines import EngineReportRow, EngineRow
from proxy.database.tables.jobs import JobRow, JobScheduleRow
from proxy.database.tables.judgements import JudgementRow
from proxy.database.tables.limits import USED_LIMITS, LimitLevelRow, TokenBudgetRow
from proxy.database.tables.releases import AnswerPairRow, EvaluationResultRow, VersionFindingRow, VersionHoldRow
from proxy.database.tables.rewards import FeedbackTextRow, PreferenceRow, RewardRow
from proxy.database.tables.runs import (
    DEFAULT_PROJECT_ID,
    ApiKeyRow,
    EventRow,
    ProjectRow,
    RunRow,
    SignOutRow,
    WriteProbeRow,
)
from proxy.database.tables.sessions import GroupRow, SessionRow, SessionUserRow
from proxy.database.tables.training import ClaimedSessionRow, ClaimRow, PolicyVersionRow, TokenAuditRow
from proxy.database.tables.turns import NO_CONVERSATION, TurnRow
from proxy.database.tables.webhooks import WebhookRow

__all__ = [
    "DEFAULT_PROJECT_ID",
    "NO_CONVERSATION",
    "USED_LIMITS",
    "AnswerPairRow",
    "ApiKeyRow",
    "Base",
    "Big",
    "ClaimRow",
    "ClaimedSessionRow",
    "EngineReportRow",
    "EngineRow",
    "EvaluationResultRow",
    "EventRow",
    "FeedbackTextRow",
    "GroupRow",
    "JobRow",
    "JobScheduleRow",
    "JudgementRow",
    "LimitLevelRow",
    "PolicyVersionRow",
    "PreferenceRow",
    "ProjectRow",
    "RewardRow",
    "RunRow",
    "SessionRow",
    "SessionUserRow",
    "SignOutRow",
    "TokenAuditRow",
    "TokenBudgetRow",
    "TurnRow",
    "VersionFindingRow",
    "VersionHoldRow",
    "WebhookRow",
    "WriteProbeRow",
]
