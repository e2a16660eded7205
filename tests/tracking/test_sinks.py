"""Records of the real packages after a trainer sent steps, was restarted, and sent more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.conftest import Drive
from tests.trainer.observe.metrics.telling import about

pytestmark = pytest.mark.tracking

PROJECT = "our-agents"


def tell(drive: Drive, directory: Path, sink: str, *starts: tuple[int, ...], **settings: Any) -> None:
    given = json.dumps({"sinks": [sink], "project": PROJECT, **settings})
    for versions in starts:
        told = drive("tell", str(directory), given, *map(str, versions))
        assert told == {"ended": True, sink: len(versions)}


def rewards(*versions: int) -> list[tuple[int, Any]]:
    return [(version, pytest.approx(version / 10)) for version in versions]


def test_mlflow_continues_the_same_run(drive: Drive, tmp_path: Path) -> None:
    tell(drive, tmp_path, "mlflow", (1, 2, 3), (4, 5), (5, 6))
    (run,) = drive("read", "mlflow", str(tmp_path / "mlflow"))
    assert (run["experiment"], run["name"], run["status"]) == (PROJECT, "policy", "FINISHED")
    assert run["parameters"]["optimizer.learning_rate"] == "0.001"
    assert [(step, value) for step, value, _ in run["history"]] == rewards(1, 2, 3, 4, 5, 6)
    assert run["history"][0][2] == 1_700_000_001_000


def test_mlflow_uses_the_configured_address(drive: Drive, tmp_path: Path) -> None:
    tell(drive, tmp_path, "mlflow", (1,), mlflow={"tracking_uri": f"sqlite:///{tmp_path}/mlflow.sqlite3"})
    (run,) = drive("read", "mlflow", str(tmp_path))
    assert [step for step, _, _ in run["history"]] == [1]


def test_wandb_has_one_run_and_every_version(drive: Drive, tmp_path: Path) -> None:
    tell(drive, tmp_path, "wandb", (1, 2, 3), (4, 5), wandb={"mode": "offline"})
    first, second = drive("read", "wandb", str(tmp_path / "wandb"))
    for start in (first, second):
        assert (start["id"], start["project"], start["name"]) == (about(1).id, PROJECT, "policy")
        assert start["config"]["optimizer"]["learning_rate"] == 1e-3
        assert str(tmp_path) not in start["text"]  # no variables of the command line, which may contain keys
    rows = first["history"] + second["history"]
    assert [row["_step"] for row in rows] == [row["version"] for row in rows] == [1, 2, 3, 4, 5]
    assert [(row["version"], row["reward_mean"]) for row in rows] == rewards(1, 2, 3, 4, 5)


def test_wandb_keeps_a_version_that_is_made_again(drive: Drive, tmp_path: Path) -> None:
    tell(drive, tmp_path, "wandb", (1, 2, 3, 2, 3), wandb={"mode": "offline"})
    (run,) = drive("read", "wandb", str(tmp_path / "wandb"))
    assert [row["version"] for row in run["history"]] == [1, 2, 3, 2, 3]
    assert [row["_step"] for row in run["history"]] == [1, 2, 3, 4, 5]


def test_wandb_without_a_key_is_a_failure_of_its_own(drive: Drive, tmp_path: Path) -> None:
    given = json.dumps({"sinks": ["wandb", "mlflow"]})
    told = drive("tell", str(tmp_path), given, "1", "2")
    assert told == {"ended": True, "wandb": 0, "mlflow": 2}


def test_trackio_continues_the_same_run(drive: Drive, tmp_path: Path) -> None:
    tell(drive, tmp_path, "trackio", (1, 2, 3), (4, 5))
    (run,) = drive("read", "trackio", str(tmp_path), TRACKIO_DIR=str(tmp_path / "trackio"))
    assert run["name"] == f"policy-{about(1).id}"
    found = [(row["step"], row["reward_mean"]) for row in run["history"] if "reward_mean" in row]
    assert found == rewards(1, 2, 3, 4, 5)


@pytest.mark.parametrize("sink", ["wandb", "mlflow", "trackio"])
def test_two_runs_of_one_trainer_stay_apart(drive: Drive, tmp_path: Path, sink: str) -> None:
    offline = {"wandb": {"mode": "offline"}} if sink == "wandb" else {}
    given = json.dumps({"sinks": [sink], "project": PROJECT, **offline})
    ids = drive("together", str(tmp_path), given, "1", "2", "3")
    place = str(tmp_path) if sink == "trackio" else str(tmp_path / sink)
    found = drive("read", sink, place, TRACKIO_DIR=str(tmp_path / "trackio"))
    names = {"wandb": ids, "mlflow": ["policy", "other"], "trackio": [f"policy-{ids[0]}", f"other-{ids[1]}"]}[sink]
    told = {run["id" if sink == "wandb" else "name"]: sorted(_values(run["history"])) for run in found}
    assert told == {
        name: [pytest.approx(version / 10 + add) for version in (1, 2, 3)]
        for name, add in zip(names, (0.0, 100.0), strict=True)
    }


def _values(history: list[Any]) -> list[float]:
    """Return the rewards, however a sink stores its rows."""
    rows = [row for row in history if not isinstance(row, dict) or "reward_mean" in row]
    return [row["reward_mean"] if isinstance(row, dict) else row[1] for row in rows]
