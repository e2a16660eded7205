"""Tables of the parts of rate limits and budgets that are used. `subject_id` is the id of a run, a project or a key,
so it has no foreign key; whoever deletes one of them deletes its rows here (`USED_LIMITS`)."""

from __future__ import annotations

from sqlalchemy import Float, String
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Big, Identifier


class LimitLevelRow(Base):
    """The part of a rate limit that is used, by all proxies (`limits/bucket.py`). `kind`: calls | tokens."""

    __tablename__ = "limit_levels"

    subject_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    due_at: Mapped[float] = mapped_column(Float)
    """The time at which the allowance will be full again."""
    moved_at: Mapped[float] = mapped_column(Float)
    per_minute: Mapped[float] = mapped_column(Float)
    """The limit at the last use."""


class TokenBudgetRow(Base):
    """The tokens used in the latest day or month of a budget, by all proxies (`limits/budget.py`). `period`: day |
    month."""

    __tablename__ = "token_budgets"

    subject_id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    period: Mapped[str] = mapped_column(String(8), primary_key=True)
    starts_at: Mapped[float] = mapped_column(Float)
    tokens: Mapped[int] = mapped_column(Big)
    exhausted_at: Mapped[float | None] = mapped_column(Float)
    """When the budget was found exhausted, which the event log reports once; null while some of it is left."""


USED_LIMITS = (LimitLevelRow, TokenBudgetRow)
"""The tables whose rows belong to a subject."""
