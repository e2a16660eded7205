"""`python -m tests.tracking.read wandb|mlflow|trackio DIRECTORY`: print what the package stored, read by its own
means."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def library(name: str) -> Any:
    return importlib.import_module(name)


def wandb(directory: Path) -> list[dict[str, Any]]:
    """Return, by start of the trainer: run id, project, configuration, rows of the history."""
    found = []
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        inspected = subprocess.run(
            [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", file],
            capture_output=True,
            text=True,
            check=True,
        )
        records = [json.loads(line) for line in inspected.stdout.splitlines() if line.startswith("{")]
        (run,) = (record["run"] for record in records if record["type"] == "run")
        found.append(
            {
                "id": run["run_id"],
                "project": run["project"],
                "name": run["display_name"],
                "config": run["config"]["update"],
                "history": [record["history"]["item"] for record in records if record["type"] == "history"],
                "text": inspected.stdout,
            }
        )
    return found


def mlflow(directory: Path) -> list[dict[str, Any]]:
    client = library("mlflow").MlflowClient(tracking_uri=f"sqlite:///{directory}/mlflow.sqlite3")
    found = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            history = client.get_metric_history(run.info.run_id, "reward_mean")
            found.append(
                {
                    "experiment": experiment.name,
                    "name": run.info.run_name,
                    "status": run.info.status,
                    "parameters": run.data.params,
                    "history": [(each.step, each.value, each.timestamp) for each in history],
                }
            )
    return found


def trackio(directory: Path) -> list[dict[str, Any]]:
    found = []
    for run in library("trackio").Api().runs("our-agents"):
        history = library("trackio.sqlite_storage").SQLiteStorage.get_logs("our-agents", run.name)
        found.append({"name": run.name, "config": run.config, "history": history})
    return found


def main(sink: str, directory: str) -> None:
    found = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}[sink](Path(directory))
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
