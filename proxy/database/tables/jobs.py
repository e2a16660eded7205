"""Tables of background jobs and of the schedules that create them."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Float,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, ByteOrdered, Identifier, Json

_PENDING = text("state IN ('waiting', 'failed')")
_RUNNING = text("state = 'running'")
_DEAD = text("state = 'dead'")
_FINISHED = text("finished_at IS NOT NULL")


class JobRow(Base):
    """A unit of background work, written in the transaction that caused it.

    `state`:
      waiting    not tried yet, or given back by a process that stopped
      running    leased to a worker until `lease_until`
      failed     an attempt failed; the next one is due at `due_at`
      done       completed, with its effect, in one transaction
      dead       every attempt failed, or the handler refused the job: an operator decides
      cancelled  an operator decided against it
    """

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("kind", "key"),
        Index("ix_jobs_pending", "kind", "run_id", "due_at", sqlite_where=_PENDING, postgresql_where=_PENDING),
        Index("ix_jobs_running", "kind", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
        Index("ix_jobs_dead", "id", sqlite_where=_DEAD, postgresql_where=_DEAD),
        Index("ix_jobs_finished", "finished_at", sqlite_where=_FINISHED, postgresql_where=_FINISHED),
        CheckConstraint("state IN ('waiting', 'running', 'failed', 'done', 'dead', 'cancelled')", name="state"),
    )

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    kind: Mapped[str] = mapped_column(String(64))
    key: Mapped[str] = mapped_column(ByteOrdered)
    """The idempotency key: a kind has at most one job of each key."""
    run_id: Mapped[str] = mapped_column(String(40), server_default=text("''"))
    """The run that the job belongs to, for fairness between runs; empty for none. No foreign key: a job may outlive
    its run, and then fails with a reason."""
    state: Mapped[str] = mapped_column(String(12))
    payload: Mapped[Json]
    result: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[str | None] = mapped_column(Text)
    """Why the last attempt failed; null once the job is done."""
    attempts: Mapped[int] = mapped_column(Integer)
    """Attempts that were started; reset when an operator retries the job."""
    due_at: Mapped[float] = mapped_column(Float)
    dispatched_at: Mapped[float | None] = mapped_column(Float)
    """When the job's id was last sent to the broker; null once a worker has leased the job."""
    owner: Mapped[str | None] = mapped_column(String(128))
    """The lease: the worker's name and a random part, so that no two leases are equal. Null without a lease."""
    lease_until: Mapped[float | None] = mapped_column(Float)
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    """When the last attempt began."""
    finished_at: Mapped[float | None] = mapped_column(Float)
    """When the job became done, dead or cancelled."""


class JobScheduleRow(Base):
    """The last tick of a schedule for which a job was created."""

    __tablename__ = "job_schedules"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    ticked_at: Mapped[float] = mapped_column(Float)
