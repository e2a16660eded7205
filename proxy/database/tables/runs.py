"""Tables of projects, runs, keys and events, and two small ones of the server itself."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Big, Identifier, Json

DEFAULT_PROJECT_ID = "prj_default"
"""Id of the project `default`, to which runs belong that were created without a project."""


class ProjectRow(Base):
    """A project: runs, and the keys of the people and agents that work on them. The project `default` always
    exists."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float] = mapped_column(Float)
    archived_at: Mapped[float | None] = mapped_column(Float)
    settings: Mapped[Json]
    """`limits`: bounds on the calls of the project's runs together (`settings.UsageLimits`); absent without any."""


class RunRow(Base):
    """A policy being trained. `head_version` is the version that the trainer continues from, `serving_version` the
    one that the engines serve (`serving/reconciler.py`). They should serve `pinned_version`, or else
    `promoted_version`, the newest that passed its gates, or else the head."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    # The database fills the default in as well: a proxy of before, on the same store, inserts runs without a project.
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), server_default=DEFAULT_PROJECT_ID)
    state: Mapped[str] = mapped_column(String(16))  # active | paused | archived
    base_model: Mapped[str] = mapped_column(Text)
    config: Mapped[Json]
    head_version: Mapped[int] = mapped_column(Integer)
    serving_version: Mapped[int] = mapped_column(Integer)
    pinned_version: Mapped[int | None] = mapped_column(Integer)
    promoted_version: Mapped[int | None] = mapped_column(Integer)
    """Null while the run releases every version at once (`release.policy = "immediate"`)."""
    # No foreign key: SQLite adds none to a table that exists. `runs/beginnings.py` and the deletion of runs see to it
    # that the version is there.
    begun_from_run_id: Mapped[str | None] = mapped_column(Identifier)
    """The run from whose version `begun_from_version` this one began; null if it began from its base model."""
    begun_from_version: Mapped[int | None] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float)
    reward_rules: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """The rules by which rewards of untrained sessions are combined (`contract.reward.RewardRules`). If they differ
    from those in `config`, `feedback/rules.py` has yet to apply the new ones to the sessions."""


class ApiKeyRow(Base):
    """A bearer key, stored as the HMAC of its text. A session key names its session; a key for a whole project names
    the project and no run."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "run_id"), Index(None, "project_id"))

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # admin | project | run | session | trainer | viewer | reviewer
    digest: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id"))
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    label: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
    last_used_at: Mapped[float | None] = mapped_column(Float)
    """Up to a minute late; null for session keys, whose use is not recorded."""
    revoked_at: Mapped[float | None] = mapped_column(Float)
    """In the future while a rotated key still works."""
    expires_at: Mapped[float | None] = mapped_column(Float)
    limits: Mapped[Json | None] = mapped_column(JSON(none_as_null=True))
    """Bounds on the calls made with the key (`settings.UsageLimits`)."""
    limited_as: Mapped[str | None] = mapped_column(Identifier)
    """The key whose limits bind this one, and count its calls; null: its own. For the key of a session it is the key
    that opened the session, and for a key made by a rotation the first one of the row."""


class EventRow(Base):
    """The event log, for the admin page and audits. Each row is appended in the transaction of the change it
    reports."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "run_id", "id"),)

    id: Mapped[int] = mapped_column(Big, primary_key=True, autoincrement=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[str] = mapped_column(String(48))
    data: Mapped[Json]
    created_at: Mapped[float] = mapped_column(Float, server_default=text("0"))


class SignOutRow(Base):
    """A sign-in to the admin page that ended before its cookie expires (`admin/sign_in.py`)."""

    __tablename__ = "sign_outs"

    sign_in: Mapped[str] = mapped_column(Identifier, primary_key=True)
    until: Mapped[float] = mapped_column(Float)
    """When the cookie expires; the row may be deleted then."""


class WriteProbeRow(Base):
    """A single row, written to test whether the store accepts writes (`database/probe.py`)."""

    __tablename__ = "write_probes"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    at: Mapped[float] = mapped_column(Float)
