"""The request of a turn, which may be stored with an ancestor."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Label, Select, func, select
from sqlalchemy.orm import aliased

from proxy.database.packed_json import PackedJson
from proxy.database.tables import TurnRow


def request_as_sent() -> Label[Any]:
    """Return a column `request` for a query of turns: the turn's own, or that of the turn `request_of`."""
    holder = aliased(TurnRow)
    kept = select(holder.request).where(holder.id == TurnRow.request_of).scalar_subquery()
    return func.coalesce(TurnRow.request, kept, type_=PackedJson()).label("request")


def turns_as_sent() -> Select[*tuple[Any, ...]]:
    """Return a query of turns with all their columns, each with its request."""
    return select(*(column for column in TurnRow.__table__.columns if column.name != "request"), request_as_sent())
