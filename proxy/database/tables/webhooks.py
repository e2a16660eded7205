"""The table of webhooks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Big, Identifier


class WebhookRow(Base):
    """A URL that receives events: those of one run, of the runs of one project, or of the whole installation."""

    __tablename__ = "webhooks"
    __table_args__ = (Index(None, "run_id"), Index(None, "project_id"))

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[Any]]
    """Kinds of events, domains of several, or `*`."""
    label: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    last_event_id: Mapped[int] = mapped_column(Big)
    """The last event of the log that was considered for the webhook."""
    secret_generation: Mapped[int] = mapped_column(Integer)
    """The signing secret is derived from this number and the installation's secret (`outbound/secrets.py`)."""
    secret_fingerprint: Mapped[str] = mapped_column(String(16))
    """Identifies the installation's secret from which it is derived."""
    previous_until: Mapped[float | None] = mapped_column(Float)
    """Until when requests are signed with the previous generation too."""
    last_success_at: Mapped[float | None] = mapped_column(Float)
    failing_since: Mapped[float | None] = mapped_column(Float)
    """The first failed attempt after the last success; null if the last attempt succeeded."""
    last_error: Mapped[str | None] = mapped_column(Text)
    disabled_at: Mapped[float | None] = mapped_column(Float)
    disabled_because: Mapped[str | None] = mapped_column(Text)
