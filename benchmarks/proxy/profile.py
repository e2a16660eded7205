"""A profile of the proxy, by py-spy."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from pathlib import Path

from benchmarks.proxy.environments import PY_SPY

SAMPLES_PER_SECOND = 200
_LINES = 30


class Profiler:
    """Observes a process from outside between `begin` and `end`, which slows it by a few percent at most."""

    def __init__(self, folder: Path) -> None:
        self._stacks = folder / "profile.txt"
        self._program = PY_SPY.made() / "bin" / "py-spy"
        self._running: subprocess.Popen[bytes]

    def begin(self, pid: int) -> None:
        """Start py-spy. It needs the right to trace, which a user has for own processes unless Yama forbids it."""
        options = (
            "--format",
            "raw",
            "--rate",
            str(SAMPLES_PER_SECOND),
            "--nonblocking",
            "--output",
            str(self._stacks),
        )
        with self._stacks.with_suffix(".log").open("wb") as log:
            argv = (str(self._program), "record", *options, "--pid", str(pid))
            self._running = subprocess.Popen(argv, stdout=log, stderr=log)

    def end(self) -> None:
        self._running.send_signal(signal.SIGINT)
        self._running.wait(60)

    def report(self) -> str:
        """Return the most expensive functions: the share of samples in each, and in what it calls."""
        return table(self._stacks)


def table(stacks: Path) -> str:
    own: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
        total += int(count)
        own[frames[-1]] += int(count)
        within.update(dict.fromkeys(frames, int(count)))
    rows = [f"{total} samples; functions by their own share of them, then by the share within them", ""]
    for title, counts in (("own", own), ("within", within)):
        rows += [f"{title:>6}  {'within' if title == 'own' else 'own':>6}  function"]
        for frame, samples in counts.most_common(_LINES):
            other = within[frame] if title == "own" else own[frame]
            rows.append(f"{samples / total:6.1%}  {other / total:6.1%}  {frame}")
        rows.append("")
    return "\n".join(rows)
