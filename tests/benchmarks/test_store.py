from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.store.__main__ import beside_others


def test_measuring_one_database_keeps_the_others_result(tmp_path: Path) -> None:
    path = tmp_path / "store.json"

    def result(turns: int, **databases: int) -> dict[str, Any]:
        return {"machine": {}, "turns": turns, "databases": databases}

    assert beside_others(result(10, postgresql=1), path) == result(10, postgresql=1)
    path.write_text(json.dumps(result(10, sqlite=2, postgresql=3)))
    found = beside_others(result(10, postgresql=1), path)
    assert found == result(10, sqlite=2, postgresql=1)
    assert list(found["databases"]) == ["sqlite", "postgresql"]
    assert beside_others(result(20, postgresql=1), path) == result(20, postgresql=1)
