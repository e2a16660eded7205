"""Decide which engine serves which run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.contract.identifiers import RunId


class PlaceableRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be served. `by_adapter`: its versions are adapters that an engine holds beside those of other runs."""

    id: RunId
    base_model: str
    by_adapter: bool = False


class PlaceableEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that takes calls. `run` is the one run that it is dedicated to; None for an engine of any run of its
    base model."""

    name: str
    base_model: str
    run: RunId | None = None


def place_runs(engines: Sequence[PlaceableEngine], runs: Sequence[PlaceableRun]) -> dict[str, tuple[RunId, ...]]:
    """Return the runs of every engine, by the engine's name. `engines` and `runs` are sorted by age, oldest first.

    A dedicated engine serves its run alone. Of the other engines of a base model, every run of whole weights without
    a dedicated engine gets one, the oldest run first, because such an engine holds the weights of one run only. The
    engines that are left are shared by all adapter runs of the base model; without adapter runs, they become further
    engines of the runs of whole weights, in turn.
    """
    known = {run.id: run for run in runs}
    placed: dict[str, tuple[RunId, ...]] = {engine.name: () for engine in engines}
    free: dict[str, list[str]] = {}
    for engine in engines:
        if engine.run is None:
            free.setdefault(engine.base_model, []).append(engine.name)
        elif engine.run in known:
            placed[engine.name] = (engine.run,)
    dedicated = {engine.run for engine in engines}
    for base_model, names in free.items():
        of_model = [run for run in runs if run.base_model == base_model and run.id not in dedicated]
        whole = [run.id for run in of_model if not run.by_adapter]
        shared = tuple(run.id for run in of_model if run.by_adapter)
        for index, name in enumerate(names):
            if index < len(whole):
                placed[name] = (whole[index],)
            elif shared:
                placed[name] = shared
            elif whole:
                placed[name] = (whole[index % len(whole)],)
    return placed


def no_engine_for(run: str, base_model: str) -> str:
    """Return what to tell people about a run that is placed on no engine."""
    return (
        f"no engine is free for the run {run!r} on {base_model}: add one (`base-rl engines add`, engine.replicas, or"
        " an [engines.NAME] table in the configuration), or archive a run that needs its engine no more"
    )
