"""`python -m tests.tracking.tell DIRECTORY SETTINGS VERSION…`: simulate a trainer's start, steps and end for the
sinks of `[trainer.metrics]` as JSON. Print how many steps each has written."""

from __future__ import annotations

import json
import sys
import time

from tests.trainer.observe.metrics.telling import about, metrics
from trainer.config import MetricsSettings
from trainer.observe.metrics.background import BackgroundSink
from trainer.observe.metrics.sink import StepMetrics
from trainer.observe.metrics.sinks import make_sink


def main(directory: str, given: str, *versions: str) -> None:
    settings = MetricsSettings.model_validate({"directory": directory, **json.loads(given)})
    told = [int(version) for version in versions]
    sinks = [BackgroundSink(name.value, make_sink(name, settings), about(told[0])) for name in settings.sinks]
    for version in told:
        for sink in sinks:
            sink.put(StepMetrics(version, 1_700_000_000.0 + version, metrics(version)))
    for sink in sinks:
        sink.finish()
    deadline = time.monotonic() + 90
    ended = [sink.join(deadline) for sink in sinks]
    sys.stdout.write(f"\n{json.dumps({'ended': all(ended), **{sink.name: sink.written for sink in sinks}})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
