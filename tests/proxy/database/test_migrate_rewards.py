"""The upgrade of a store with rewards from before revisions were marked."""

from __future__ import annotations

from typing import Any

from sqlalchemy import create_engine, insert, make_url, select

from proxy.database.migrate import downgrade, upgrade
from proxy.database.tables import ClaimedSessionRow, ClaimRow, RewardRow, RunRow, SessionRow
from proxy.settings import RunSettings

RULES = {"weights": {"style": 0.5}}


def test_earlier_revisions_are_marked_and_claims_get_the_rules_of_their_time(database_url: str) -> None:
    url = make_url(database_url)
    sync = url.set(drivername="sqlite") if url.get_backend_name() == "sqlite" else url
    engine = create_engine(sync)
    config = RunSettings(name="policy", model="m", reward_weights={"style": 0.5}).model_dump(mode="json")
    run: dict[str, Any] = {"id": "run_1", "name": "policy", "state": "active", "base_model": "m", "config": config}
    claim = {"id": "clm_1", "run_id": "run_1", "trainer": "t", "state": "committed", "base_version": 0}
    # name: reward now, and when another entry came after training
    sessions = {"as_it_was": (1.0, None), "the_same_again": (1.0, 5.0), "revised": (0.0, 6.0)}
    with engine.begin() as connection:
        connection.execute(insert(RunRow).values(run | {"head_version": 1, "serving_version": 1, "created_at": 0.0}))
        connection.execute(insert(ClaimRow).values(claim | {"created_at": 0.0, "lease_expires_at": 0.0}))
        for name, (reward, late_at) in sessions.items():
            row = {"id": name, "run_id": "run_1", "purpose": "train", "attributed_by": "created", "state": "ended"}
            row |= {"training": "consumed", "claim_id": "clm_1"}
            at = {"turn_count": 1, "reward": reward, "consumed_by": 1, "created_at": 0.0, "last_active_at": 0.0}
            connection.execute(insert(SessionRow).values(row | at))
            handed = {"claim_id": "clm_1", "session_id": name, "position": 0, "reward": 1.0, "turn_count": 1}
            connection.execute(insert(ClaimedSessionRow).values(handed | {"reward_ids": [f"first_{name}"]}))
            entry = {"run_id": "run_1", "session_id": name, "name": "reward", "source": "api"}
            for identifier, value, created_at in (("first", 1.0, 1.0), ("late", reward, late_at)):
                if created_at is not None:
                    when = {"id": f"{identifier}_{name}", "value": value, "created_at": created_at}
                    late = {"after_training": identifier == "late"}
                    connection.execute(insert(RewardRow).values(entry | when | late))
    downgrade(database_url, "0001")
    upgrade(database_url)
    with engine.connect() as connection:
        revised = dict(connection.execute(select(SessionRow.id, SessionRow.revised_at)).all())
        assert revised == {"as_it_was": None, "the_same_again": None, "revised": 6.0}
        assert connection.execute(select(ClaimRow.reward_rules)).scalar_one() == RULES
        assert connection.execute(select(RunRow.reward_rules)).scalar_one() == RULES
    engine.dispose()
