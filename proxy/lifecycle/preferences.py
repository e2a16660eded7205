"""The query for the preferences about a session."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select, union

from proxy.database.tables import PreferenceRow


def preferences_about(session_id: str) -> Select[Any]:
    """Return the query, in order of arrival."""
    # A union of two index look-ups: for an OR over both columns the planner may scan all preferences.
    found = union(
        select(PreferenceRow.sequence).where(PreferenceRow.chosen_session_id == session_id),
        select(PreferenceRow.sequence).where(PreferenceRow.rejected_session_id == session_id),
    )
    return select(PreferenceRow.__table__).where(PreferenceRow.sequence.in_(found)).order_by(PreferenceRow.sequence)
