"""Traces of chosen steps by torch's profiler, as files that chrome://tracing and Perfetto open."""

from __future__ import annotations

import os

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

from trainer.config import ProfileSettings

_log = structlog.get_logger("trainer")


class Profiler:
    """torch's profiler. A process can run only one at a time, so the runs that it trains take turns."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: profile | None = None

    def start(self) -> bool:
        """Start the profiler. Return False if another run uses it."""
        if self._running is not None:
            return False
        self._running = profile(activities=self._activities)
        self._running.start()
        return True

    def collect(self, collects: bool) -> None:
        """Switch collecting on or off."""
        assert self._running is not None
        self._running.toggle_collection_dynamic(collects, self._activities)

    def stop(self) -> profile:
        running, self._running = self._running, None
        assert running is not None
        running.stop()
        return running


class StepTrace:
    """The trace of one run on one rank. Call `between_steps` when no phase is under way."""

    def __init__(self, settings: ProfileSettings, run_id: str, rank: int, profiler: Profiler) -> None:
        self._settings = settings
        self._directory = settings.directory.resolve() / run_id
        self._rank = rank
        self._profiler = profiler
        self._traces = False
        self._begun_at: int | None = None
        self._first = 0
        """The version that the first traced step makes; 0: nothing was traced yet."""

    def between_steps(self, version: int) -> None:
        """Start or end the trace if it is time. `version` is the head, so a step that is repeated or waits for
        trajectories counts once."""
        if self._begun_at is None:
            self._begun_at = version
        made = version - self._begun_at
        if self._traces:
            if version >= self._first - 1 + self._settings.steps:
                self._end(version)
        elif made >= self._settings.first - 1 and self._settings.steps and not self._first:
            self._traces = self._profiler.start()
            if not self._traces:
                return
            self._first = version + 1
            _log.info("profiling", steps=self._settings.steps, first_version=self._first)

    def set_aside(self) -> None:
        """Leave the steps of other runs out of the trace."""
        if self._traces:
            self._profiler.collect(False)

    def take_up(self) -> None:
        """Continue the trace with the next step of this run."""
        if self._traces:
            self._profiler.collect(True)

    def close(self, version: int) -> None:
        """Write the trace of the complete steps."""
        if self._traces and version >= self._first:
            self._end(version)
        elif self._traces:
            self._traces = False
            self._profiler.stop()

    def _end(self, version: int) -> None:
        self._traces = False
        traced = self._profiler.stop()
        path = self._directory / f"v{self._first}-v{version}-rank{self._rank}.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            traced.export_chrome_trace(str(partial))
            partial.rename(path)
        except (OSError, RuntimeError) as error:
            _log.warning("the profile could not be written", path=str(path), reason=str(error))
            return
        _log.info("profile written: open it with https://ui.perfetto.dev or chrome://tracing", path=str(path))
