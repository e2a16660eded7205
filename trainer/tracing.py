"""Traces of chosen steps by torch's profiler, as files that chrome://tracing and Perfetto open."""

from __future__ import annotations

import os

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

from trainer.config import ProfileSettings

_log = structlog.get_logger("trainer")


class StepTrace:
    """Every rank has its own. `between_steps` is to be called when no phase is under way."""

    def __init__(self, settings: ProfileSettings, run_id: str, rank: int, device: torch.device) -> None:
        self._settings = settings
        self._directory = settings.directory.resolve() / run_id
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profiler: profile | None = None
        self._begun_at: int | None = None
        self._first = 0
        """The version that the first traced step makes; 0: none yet."""

    def between_steps(self, version: int) -> None:
        """`version` is the head: a step that was made in vain, or that waits for trajectories, counts once."""
        if self._begun_at is None:
            self._begun_at = version
        made = version - self._begun_at
        if self._profiler is not None:
            if version >= self._first - 1 + self._settings.steps:
                self._end(version)
        elif made >= self._settings.first - 1 and self._settings.steps and not self._first:
            self._first = version + 1
            self._profiler = profile(activities=self._activities)
            self._profiler.start()
            _log.info("profiling", steps=self._settings.steps, first_version=self._first)

    def close(self, version: int) -> None:
        """Writes what there is of steps that are whole."""
        if self._profiler is not None and version >= self._first:
            self._end(version)

    def _end(self, version: int) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        path = self._directory / f"v{self._first}-v{version}-rank{self._rank}.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            profiler.export_chrome_trace(str(partial))
            partial.rename(path)
        except (OSError, RuntimeError) as error:
            _log.warning("the profile could not be written", path=str(path), reason=str(error))
            return
        _log.info("profile written: open it with https://ui.perfetto.dev or chrome://tracing", path=str(path))
