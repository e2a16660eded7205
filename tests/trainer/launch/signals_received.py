"""A stand-in for the trainer: it writes its rank, and after the first SIGTERM how many came within half a second."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    place = Path(sys.argv[1])
    place.write_text(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
    while not received:
        time.sleep(0.01)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        time.sleep(0.01)
    with place.open("a") as file:
        file.write(f"{len(received)}\n")
    sys.exit(0)
