"""Send metrics of two runs of one trainer in turns, as `tell` does for one run, and print the runs' ids.

Usage: `python -m tests.tracking.together DIRECTORY SETTINGS VERSION…`
"""

from __future__ import annotations

import dataclasses
import json
import sys

from tests.trainer.observe.metrics.telling import about, metrics
from trainer.config import MetricsSettings
from trainer.observe.metrics import sinks as module
from trainer.observe.metrics.sinks import Sinks, open_sinks


def main(directory: str, given: str, *versions: str) -> None:
    module.CLOSE_SECONDS = 90.0  # in this test the real services take longer to end than the trainer waits
    settings = MetricsSettings.model_validate({"directory": directory, **json.loads(given)})
    first = about(int(versions[0]))
    runs = [first, dataclasses.replace(first, id=f"{first.id[:-1]}1", name="other")]
    sinks: list[Sinks] = [open_sinks(settings, run) for run in runs]
    for version in map(int, versions):
        for number, each in enumerate(sinks):
            each.put(version, metrics(version, add=100.0 * number))
    for each in sinks:
        each.finish()
    for each in sinks:
        each.close()
    sys.stdout.write(f"\n{json.dumps([run.id for run in runs])}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
