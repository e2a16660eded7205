"""Builds views from rows of the ledger, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.database.rows import AnyRow
from proxy.overview.rewards.views import PreferenceView, RewardItem


def reward_items(ledger: Iterable[AnyRow], used_by: Mapping[str, int]) -> list[RewardItem]:
    """Build views of ledger entries. `ledger` has all entries of its sessions in order of arrival, so that an entry
    with a later one about the same subject is marked as superseded."""
    rows = list(ledger)
    latest = {subject_of(row): row.sequence for row in rows}
    return [
        RewardItem(
            sequence=row.sequence,
            id=row.id,
            session_id=row.session_id,
            turn_id=row.turn_id,
            name=row.name,
            value=row.value,
            source=row.source,
            comment=row.comment,
            created_at=row.created_at,
            after_training=row.after_training,
            superseded=latest[subject_of(row)] != row.sequence,
            used_by=used_by.get(row.id),
        )
        for row in rows
    ]


def used_by(trainings: Iterable[AnyRow]) -> dict[str, int]:
    """Map reward ids to the version whose step trained on the reward."""
    return {reward_id: training.version for training in trainings for reward_id in training.reward_ids}


def preference_view(row: AnyRow) -> PreferenceView:
    return PreferenceView(
        id=row.id,
        chosen_session_id=row.chosen_session_id,
        chosen_turn_id=row.chosen_turn_id,
        rejected_session_id=row.rejected_session_id,
        rejected_turn_id=row.rejected_turn_id,
        source=row.source,
        comment=row.comment,
        created_at=row.created_at,
    )


def subject_of(row: AnyRow) -> tuple[str, str | None, str, str]:
    """Return what a ledger entry is about: of entries with the same subject, the last counts."""
    return (row.session_id, row.turn_id, row.name, row.source)
