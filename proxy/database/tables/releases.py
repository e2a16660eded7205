"""Tables of what decides about versions: findings of gates, results of evaluations, pairs of answers, and held
sessions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from proxy.database.packed_json import PackedJson
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


class AnswerPairRow(Base):
    """Two answers to one prompt: the recorded one of the serving version, and one of a candidate that no caller saw
    (`[run.release.shadow]`). A judge may then say which of the two is better.

    It is no turn, so nothing of it can be continued, trained, exported or rewarded. Erasure of the session removes
    `response`. What the judge has used stays recorded.
    """

    __tablename__ = "answer_pairs"
    __table_args__ = (Index(None, "run_id", "version"), Index(None, "session_id"))

    id: Mapped[str] = mapped_column(Identifier, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    version: Mapped[int] = mapped_column(Integer)
    """The candidate."""
    against: Mapped[int] = mapped_column(Integer)
    """The version that produced all tokens of the turn."""
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    turn_id: Mapped[str] = mapped_column(ForeignKey("turns.id"))
    state: Mapped[str] = mapped_column(String(12))
    """`contract.turn.TurnState` of the candidate's answer: complete or failed."""
    finish_reason: Mapped[str] = mapped_column(String(16))
    output_tokens: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float] = mapped_column(Float)
    """From the moment at which a slot of the engine was free."""
    created_at: Mapped[float] = mapped_column(Float)
    judge: Mapped[str | None] = mapped_column(String(64))
    """The judge that was asked last."""
    preference: Mapped[float | None] = mapped_column(Float)
    """1 if the candidate's answer is better, 0 if the other one is, 0.5 if neither is; null while no judge has
    said."""
    is_consistent: Mapped[bool | None] = mapped_column(Boolean)
    """Whether the judge said the same in both orders. If not, `preference` is 0.5, and the gate does not count it."""
    judged_at: Mapped[float | None] = mapped_column(Float)
    """When a judge was asked last."""
    prompt_tokens: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    completion_tokens: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    """Tokens that judges have used for the pair, those of failed attempts included."""
    cost: Mapped[float | None] = mapped_column(Float)
    """Null if a price is unknown, or nothing was used."""
    response: Mapped[Any] = mapped_column(PackedJson)
    """The candidate's answer in the form of `turns.response`."""
