"""Versions beside the serving one: which sessions they answer, and on which engines they are.

A run of adapters needs no engine for them: every engine of it loads the adapter when a call names it. Of a run of
whole weights, one engine for each such version is set apart, as long as another one is left for the serving version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.runs.service import RunView
from proxy.serving.controller import RunController
from proxy.versions.release import Track, read_tracks, track_of


class RunTracks:
    """The tracks of all runs, as of the last `read`. A change in the store reaches calls after the next one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tracks: Mapping[str, tuple[Track, ...]] = {}

    async def read(self, runs: Sequence[RunView]) -> None:
        """Read the tracks of these runs. Raises StoreUnavailable."""
        self._tracks = await self._database.read(lambda connection: read_tracks(connection, runs))

    def find(self, run_id: RunId, session_id: str, key_id: str) -> Track | None:
        """Return the track of a session; None if the serving version answers it."""
        tracks = self._tracks.get(run_id)
        return None if tracks is None else track_of(tracks, session_id, key_id)

    def shadow(self, run_id: RunId) -> int | None:
        """Return the candidate that answers a share of the run's prompts unseen; None without one."""
        return next((track.version for track in self._tracks.get(run_id, ()) if track.is_shadow), None)

    def set_apart(self, run_id: RunId, controllers: Sequence[RunController]) -> None:
        """Give the run's versions beside the serving one an engine each, the last engines first. The first engine
        always serves the run."""
        versions = _in_order(self._tracks.get(run_id, ()))
        apart = dict(zip(reversed(controllers[1:]), versions, strict=False))
        for controller in controllers:
            controller.set_apart(apart.get(controller))


def _in_order(tracks: Collection[Track]) -> list[int]:
    """Return the versions of the tracks. Holds come first: a new canary must not move their engines."""
    ordered = sorted(tracks, key=lambda track: track.is_canary)
    return list(dict.fromkeys(track.version for track in ordered))


def serving_the_run(controllers: Sequence[RunController]) -> Sequence[RunController]:
    """Return the controllers of the engines that serve the run, without those set apart for other versions."""
    if len(controllers) == 1:  # the usual case, for every call
        return controllers
    return [each for each in controllers if each.apart is None]
