"""The declarative base of all tables, and the column types that several of them use."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Integer,
    MetaData,
    String,
    Text,
)
from sqlalchemy.orm import DeclarativeBase

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

Identifier = String(40)
Big = BigInteger().with_variant(Integer(), "sqlite")
"""Integers beyond 32 bits. Any integer of SQLite has up to 64, and only `Integer` may be an autoincrement key
there."""

ByteOrdered = Text().with_variant(Text(collation="C"), "postgresql")
"""Text ordered by its bytes, whatever the database's locale is, so that an index serves searches for a prefix."""

Json = dict[str, Any]


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {Json: JSON, list[Any]: JSON}  # noqa: RUF012  (SQLAlchemy's own declaration)
