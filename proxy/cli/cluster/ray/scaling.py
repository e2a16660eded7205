"""How many engines a run has on Ray: as many as `base-rl engines scale` asked for, changed by a rule about load.

`base-rl up --ray` and `base-rl engines scale` meet in the data directory, which all nodes share: the first touches a
file while it runs, the second writes the wanted number into another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from proxy.cli.console import Refused
from proxy.private_files import make_directory
from proxy.settings.ray import RaySettings

# A burst of calls that ends sooner needs no further engine.
_BUSY_S = 10.0
# Far longer than the pause between two touches, for storage that is slow to show them.
_STALE_S = 30.0
_READY = "ready"


class WantedEngines:
    """The files by which a wanted number of engines reaches the command that places them."""

    def __init__(self, data_dir: Path, run: str) -> None:
        directory = data_dir.resolve() / "ray"
        self._run = run
        self._wanted = directory / f"{run}.engines"
        self._running = directory / f"{run}.running"

    def begin(self) -> None:
        """Forget what was asked for before, and say that the placing command runs."""
        make_directory(self._wanted.parent)
        self._wanted.unlink(missing_ok=True)
        self.touch()

    def touch(self) -> None:
        self._running.touch()

    def end(self) -> None:
        self._running.unlink(missing_ok=True)

    def take(self) -> int | None:
        """Return the number that was asked for since the last time, None if none was."""
        taken = self._wanted.with_suffix(".taken")
        try:
            # Renamed before it is read: a number that is asked for meanwhile is the next one.
            self._wanted.rename(taken)
            return int(taken.read_text())
        except FileNotFoundError:
            return None

    def ask(self, number: int) -> None:
        """Ask for a number of engines. Raises Refused if no command runs that would place them."""
        part = self._wanted.with_suffix(f".{os.getpid()}")
        try:
            part.write_text(str(number))
            # Both times are those of the storage, whose clock may differ from this machine's.
            age = part.stat().st_mtime - self._running.stat().st_mtime
        except FileNotFoundError:
            age = _STALE_S
        if age >= _STALE_S:
            part.unlink(missing_ok=True)
            raise Refused(
                f"no `base-rl up --ray` runs for {self._run} with the data directory {self._running.parent.parent}:"
                " start it, or name another with --data-dir"
            )
        part.rename(self._wanted)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change that the rule asks for: one more engine, or the removal of this one."""

    remove: str | None = None
    reason: str


class LoadRule:
    """Adds an engine when calls queue, and removes one that is idle, within the bounds of the settings."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._busy_since: float | None = None
        self._idle_since: dict[str, float] = {}

    @property
    def acts(self) -> bool:
        """Return whether the settings ask for changes at all."""
        return self._settings.max_engines is not None

    def decide(self, engines: Mapping[str, Mapping[str, Any]], count: int, now: float) -> Change | None:
        """Return the change that the load asks for.

        `engines` are the rows of the run's engines by their names, as the API has them; `count` is the number of
        engines that there are or that are being placed, `now` a monotonic time in seconds.
        """
        settings = self._settings
        ready = {name: row for name, row in engines.items() if row["state"] == _READY}
        calls = sum(row["calls"] for row in ready.values())
        busy = len(ready) > 0 and calls > settings.calls_per_engine * len(ready)
        self._busy_since = (self._busy_since if self._busy_since is not None else now) if busy else None
        self._idle_since = {name: self._idle_since.get(name, now) for name, row in ready.items() if row["calls"] == 0}
        # An engine that is being placed or loads its model may be all that was missing.
        may_add = len(ready) == count < (settings.max_engines or 0)
        if may_add and self._busy_since is not None and now - self._busy_since >= _BUSY_S:
            self._busy_since = None
            return Change(reason=f"{calls} calls are under way at {len(ready)} engines")
        idle = [name for name, since in self._idle_since.items() if now - since >= settings.idle_seconds]
        if idle and count > settings.min_engines:
            # The last one: engines are numbered, and the lowest free number is used first.
            return Change(remove=idle[-1], reason=f"no call for {settings.idle_seconds:.0f} s")
        return None
