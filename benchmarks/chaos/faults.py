"""Faults besides kills: lies of the engine, hostile clients, a full disk."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.places import Place, full

LIES, HOSTILITY, FULL_DISK = "lying engine", "hostile client", "full disk"
_LASTS_S = {LIES: 4.0, HOSTILITY: 5.0, FULL_DISK: 3.0}
_BETWEEN_S = 2.0
_STOP_S = 60.0


@contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this package as a process that ends with the block."""
    argv = [sys.executable, "-m", f"benchmarks.chaos.{module}", *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_STOP_S)


@dataclass
class Faults:
    """Injects one fault after another, each for `_LASTS_S` seconds, in random order."""

    place: Place
    folder: Path
    seed: int
    made: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.told = self.folder / "told"
        self.told.touch()

    def switch(self, fault: str) -> Path:
        """Return the file whose existence switches a fault on."""
        return self.folder / f"{fault}.on"

    async def work(self, seconds: float) -> None:
        """Make each kind of fault in turn until the time is over, and every kind at least once."""
        draw = random.Random(self.seed)
        ends = time.monotonic() + seconds
        while True:
            kinds = [LIES, HOSTILITY, *([FULL_DISK] if self.place.disk is not None else [])]
            draw.shuffle(kinds)
            for kind in kinds:
                if time.monotonic() > ends and all(self.made[each] for each in kinds):
                    return
                await asyncio.sleep(_BETWEEN_S)
                async with self.fault(kind):
                    await asyncio.sleep(_LASTS_S[kind])

    @asynccontextmanager
    async def fault(self, kind: str) -> AsyncIterator[None]:
        """Inject one fault for as long as the block lasts."""
        self.made[kind] += 1
        if kind == FULL_DISK:
            assert self.place.disk is not None
            with full(self.place.disk):
                yield
            await asyncio.to_thread(self.place.revive)
            return
        self.switch(kind).touch()
        try:
            yield
        finally:
            self.switch(kind).unlink()

    def lies(self) -> dict[str, int]:
        """Return how often each lie was told."""
        return dict(sorted(Counter(self.told.read_text().splitlines()).items()))


def attacks(hostile: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    """End a hostile client, and return the attacks that it sent and the statuses of the answers."""
    hostile.terminate()
    output, _ = hostile.communicate(timeout=_STOP_S)
    found: dict[str, Any] = json.loads(output)
    return dict(sorted(found.items()))
