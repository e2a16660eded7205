"""Tables of what decides about versions: findings of gates, results of evaluations, and held sessions."""

from __future__ import annotations

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.tables.base import Base, Identifier, Json


class VersionFindingRow(Base):
    """What a gate, or the watch over the serving version, has found about a version. `state`: waiting | passed |
    failed. The row of a decided version is its evidence and does not change any more."""

    __tablename__ = "version_findings"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    gate: Mapped[str] = mapped_column(String(32), primary_key=True)
    state: Mapped[str] = mapped_column(String(8))
    text: Mapped[str] = mapped_column(Text)
    """The finding as a sentence: what the gate waits for, or why it passed or failed."""
    evidence: Mapped[Json]
    updated_at: Mapped[float] = mapped_column(Float)


class EvaluationResultRow(Base):
    """The reward of one attempt of a version at one task of a suite."""

    __tablename__ = "evaluation_results"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    suite: Mapped[str] = mapped_column(String(64), primary_key=True)
    task: Mapped[str] = mapped_column(String(200), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    reward: Mapped[float] = mapped_column(Float)
    session_id: Mapped[str | None] = mapped_column(Identifier)
    created_at: Mapped[float] = mapped_column(Float)


class VersionHoldRow(Base):
    """New sessions that a version answers while others move on: those of a key, or a share of all."""

    __tablename__ = "version_holds"
    __table_args__ = (Index(None, "run_id"),)

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    version: Mapped[int] = mapped_column(Integer)
    key_id: Mapped[str | None] = mapped_column(Identifier)
    share: Mapped[float | None] = mapped_column(Float)
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float)
