"""The upgrade of a store whose sessions had no attempt numbers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import create_engine, insert, make_url, select

from proxy.database.migrate import downgrade, upgrade
from proxy.database.tables import RunRow, SessionRow
from proxy.settings import RunSettings


def test_sessions_of_one_name_are_numbered_in_the_order_of_their_creation(database_url: str) -> None:
    url = make_url(database_url)
    sync = url.set(drivername="sqlite") if url.get_backend_name() == "sqlite" else url
    engine = create_engine(sync)
    config = RunSettings(name="policy", model="m").model_dump(mode="json")
    rows = [("b", "task", 2.0), ("a", "task", 1.0), ("c", "task", 2.0), ("d", "other", 0.0), ("e", None, 0.0)]
    with engine.begin() as connection:
        for run in ("run_1", "run_2"):
            values: dict[str, Any] = {"id": run, "name": run, "state": "active", "base_model": "m", "config": config}
            values |= {"head_version": 0, "serving_version": 0, "created_at": 0.0}
            connection.execute(insert(RunRow).values(values))
            for identifier, name, created_at in rows:
                row: dict[str, Any] = {"id": f"{run}_{identifier}", "run_id": run, "external_id": name}
                row |= {"purpose": "train", "attributed_by": "user", "state": "ended", "training": "pending"}
                row |= {"turn_count": 0, "created_at": created_at, "last_active_at": created_at}
                connection.execute(insert(SessionRow).values(row))
    downgrade(database_url, "0010")
    upgrade(database_url)
    with engine.connect() as connection:
        found = dict(connection.execute(select(SessionRow.id, SessionRow.attempt)).all())
    numbers = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 1}
    assert found == {f"{run}_{name}": number for run in ("run_1", "run_2") for name, number in numbers.items()}
    engine.dispose()
