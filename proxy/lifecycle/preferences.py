"""Preferences by what they are about."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select, union

from proxy.database.tables import PreferenceRow


def preferences_about(session_id: str) -> Select[Any]:
    """In order of arrival. Two looks into indexes: an OR over both columns may be answered by a walk through all."""
    found = union(
        select(PreferenceRow.sequence).where(PreferenceRow.chosen_session_id == session_id),
        select(PreferenceRow.sequence).where(PreferenceRow.rejected_session_id == session_id),
    )
    return select(PreferenceRow.__table__).where(PreferenceRow.sequence.in_(found)).order_by(PreferenceRow.sequence)
