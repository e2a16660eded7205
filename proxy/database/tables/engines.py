"""Tables of the engines that the proxies on this store share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Identifier, Json


class EngineRow(Base):
    """An engine that proxies on this store may use. The engine itself is asked what it holds; the row has what the
    proxies must agree on."""

    __tablename__ = "engines"

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    name: Mapped[str] = mapped_column(String(160), unique=True)
    url: Mapped[str] = mapped_column(Text)
    machine: Mapped[str] = mapped_column(String(64))
    """The host that alone reaches a loopback address; empty for an address that every proxy reaches."""
    kind: Mapped[str] = mapped_column(String(16))  # embedded | sglang | scripted
    base_model: Mapped[str] = mapped_column(Text)
    run: Mapped[str | None] = mapped_column(String(64))
    """Name of the one run that the engine is dedicated to. No such run needs to exist yet."""
    origin: Mapped[str] = mapped_column(String(16))  # configured | local | api
    desired: Mapped[str] = mapped_column(String(16))  # serving | draining | drained
    lease_owner: Mapped[str | None] = mapped_column(String(160))
    """The proxy that changes what the engine holds (`serving/leases.py`)."""
    lease_until: Mapped[float | None] = mapped_column(Float)
    """When the lease ends by itself, in the database's time (`database/now.py`)."""
    created_at: Mapped[float] = mapped_column(Float)


class EngineReportRow(Base):
    """What one proxy last reported about one engine. It counts until `valid_until`, in the database's time."""

    __tablename__ = "engine_reports"

    engine_id: Mapped[str] = mapped_column(ForeignKey("engines.id"), primary_key=True)
    proxy: Mapped[str] = mapped_column(String(160), primary_key=True)
    declares: Mapped[bool] = mapped_column(Boolean)
    """Whether the configuration of this proxy names the engine."""
    state: Mapped[str] = mapped_column(String(16))
    problem: Mapped[str | None] = mapped_column(Text)
    runs: Mapped[Json]
    """The runs that the proxy has placed on the engine: the version that it serves there, or null, by run id."""
    adapters: Mapped[list[Any]]
    calls: Mapped[int] = mapped_column(Integer)
    outstanding_tokens: Mapped[int] = mapped_column(Integer)
    seen_at: Mapped[float | None] = mapped_column(Float)
    """When the engine last answered this proxy; null before its first answer."""
    valid_until: Mapped[float] = mapped_column(Float)
