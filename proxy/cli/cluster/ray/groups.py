"""Groups of actors on a Ray cluster: placed, watched, replaced when one is lost or fails, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayTaskError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from proxy.cli.cluster.ray.plan import Group, Member
from proxy.cli.cluster.ray.process import Ended, NodeProcess, Place
from proxy.cli.console import Refused
from proxy.cli.supervisor import WRONG_CONFIGURATION, PartFailed

# Longer than Ray needs to place a group if there is room for it.
_SAY_WAITING_S = 10.0
# Longer than Ray needs to forget the name of a killed actor.
_NAME_FREE_S = 15.0
_NAME_POLL_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
# For an engine, after its calls: to leave the pool and to end its process.
_AFTER_STOP_S = 15.0

# Ray finds within this time, with its default settings, that a node is lost.
_OTHERS_END_S = 30.0

Actor = Any  # Ray has no types for handles


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an actor that cannot report one, for example because its node is gone."""

    reason: str


class _Run(msgspec.Struct, kw_only=True):
    """One life of a group. `began`: all of its processes were started."""

    began: bool = False
    actors: dict[str, Actor] = msgspec.field(default_factory=dict)


class PlacedGroup:
    """Keeps one group running. `say` gets a line for everything that an operator may want to know."""

    def __init__(
        self,
        group: Group,
        *,
        directory: str,
        stop_seconds: float,
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        """`directory` is the working directory of the processes on every node."""
        self._group = group
        self._directory = directory
        self._stop_seconds = stop_seconds
        self._max_restarts = max_restarts
        self._say = say

    async def run(self) -> None:
        """Keep the group running until its processes end by themselves. Cancelling ends them in order.

        Raises PartFailed if the group cannot be started or fails too often, Refused if another driver runs it.
        """
        name, failures, pause = self._group.name, 0, _FIRST_PAUSE_S
        while True:
            run = _Run()
            began_at = time.monotonic()
            member, end = await self._live(run)
            if isinstance(end, Ended) and end.status == 0:
                self._say(f"{name} has ended")
                return
            if isinstance(end, Ended) and end.status == WRONG_CONFIGURATION:
                raise PartFailed(f"{member} cannot run with this configuration:\n{end.tail}")
            # A lost node says nothing about the program; one that never started may never do.
            failures += isinstance(end, Ended) or not run.began
            what = f"was lost ({end.reason})" if isinstance(end, Lost) else f"ended with status {end.status}"
            if failures > self._max_restarts:
                tail = f":\n{end.tail}" if isinstance(end, Ended) else ""
                raise PartFailed(f"{name} failed {failures} times; the last time {member} {what}{tail}")
            lived = time.monotonic() - began_at
            pause = _FIRST_PAUSE_S if lived > _LONGEST_PAUSE_S else min(2 * pause, _LONGEST_PAUSE_S)
            self._say(f"{member} {what}; {name} is placed again")
            await asyncio.sleep(pause)

    async def _live(self, run: _Run) -> tuple[str, Ended | Lost]:
        """Place the group, start its processes, and return the first end of one. The others are then killed."""
        # Before the placement group: without room for a second one, it would wait for the first one's end.
        await _until_free(self._group.members)
        # Names of placement groups are free only some time after their removal, so each has a name of its own.
        placed = placement_group(
            [dict(bundle) for bundle in self._group.bundles],
            strategy="PACK",
            name=f"{self._group.name}-{uuid4().hex[:6]}",
        )
        try:
            await self._until_placed(placed)
            try:
                await self._start(run, placed)
            except (RayActorError, RayTaskError) as error:
                return self._group.name, Lost(reason=_first_line(error))
            return await self._first_end(run)
        finally:
            for actor in run.actors.values():
                ray.kill(actor)
            remove_placement_group(placed)

    async def _until_placed(self, placed: PlacementGroup) -> None:
        ready = asyncio.ensure_future(_result(placed.ready()))
        try:
            await asyncio.wait([ready], timeout=_SAY_WAITING_S)
            if not ready.done():
                needs = json.dumps(self._group.bundles)
                self._say(
                    f"{self._group.name} waits for nodes with room for {needs} (`ray status` shows what is free)"
                )
            await ready
        finally:
            ready.cancel()

    async def _start(self, run: _Run, placed: PlacementGroup) -> None:
        """Create the actors and start their processes. Raises RayActorError for an actor that is lost meanwhile."""
        group = self._group
        for member in group.members:
            run.actors[member.name] = _created(member, placed)
        places: list[Place] = await asyncio.gather(
            *(_result(actor.find_place.remote()) for actor in run.actors.values())
        )
        # Where the ranks of a trainer meet; an engine ignores it.
        meeting = {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(places[0].port)}
        for member in group.members:
            environment = {**group.environment, **meeting, **member.environment}
            await _result(run.actors[member.name].start.remote(member.arguments, environment, self._directory))
        run.began = True
        where = ", ".join(dict.fromkeys(place.address for place in places))
        self._say(f"{group.name} runs on {where}")

    async def _first_end(self, run: _Run) -> tuple[str, Ended | Lost]:
        """Wait until a member ends, and return the name and the end of the member that explains it best."""
        ends = {asyncio.ensure_future(_end_of(actor)): name for name, actor in run.actors.items()}
        try:
            ended, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # Ranks that miss another one fail within moments, but Ray takes longer to find that a node is lost.
            deadline = time.monotonic() + _OTHERS_END_S
            while others and not _has_lost(ended) and (left := deadline - time.monotonic()) > 0:
                more, others = await asyncio.wait(others, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                ended |= more
        except asyncio.CancelledError:
            await self._end(run)
            raise
        finally:
            for each in ends:
                each.cancel()
        cause = min(ended, key=lambda each: _rank_as_cause(each.result()))
        return ends[cause], cause.result()

    async def _end(self, run: _Run) -> None:
        """Ask the first member to end, and wait until it has: an engine leaves the pool, the first rank gives claims
        back, for which it needs the other ranks. The others have nothing to clean up."""
        name, actor = next(iter(run.actors.items()))
        with contextlib.suppress(RayActorError):
            await _result(actor.end.remote())
        try:
            async with asyncio.timeout(self._stop_seconds + _AFTER_STOP_S):
                await _end_of(actor)
        except TimeoutError:
            self._say(
                f"{name} has not ended {self._stop_seconds + _AFTER_STOP_S:.0f} s after it was asked to; it is killed"
            )


async def _until_free(members: Sequence[Member]) -> None:
    """Wait until no actor has the name of a member. Raises Refused if another driver's has."""
    deadline = time.monotonic() + _NAME_FREE_S
    while taken := {member.name for member in members} & set(list_named_actors()):
        if time.monotonic() > deadline:
            raise _is_taken(min(taken))
        await asyncio.sleep(_NAME_POLL_S)


def _created(member: Member, placed: PlacementGroup) -> Actor:
    """Create an actor. Raises Refused if another driver has one of its name."""
    make = ray.remote(NodeProcess).options(
        name=member.name,
        num_cpus=member.cpus,
        num_gpus=member.gpus,
        # The group is replaced as a whole: a rank alone could not join ranks that are in the middle of a step.
        max_restarts=0,
        # `wait` takes one thread for as long as the process lives.
        max_concurrency=4,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=placed, placement_group_bundle_index=member.bundle
        ),
    )
    try:
        return make.remote(member.name)
    except ActorAlreadyExistsError as error:
        raise _is_taken(member.name) from error


def _is_taken(name: str) -> Refused:
    return Refused(
        f"the cluster has an actor {name} already: another `base-rl up --ray` runs for this run; end it, or name the"
        " run differently"
    )


async def _end_of(actor: Actor) -> Ended | Lost:
    try:
        ended: Ended = await _result(actor.wait.remote())
    except RayActorError as error:
        return Lost(reason=_first_line(error))
    return ended


def _has_lost(ended: set[asyncio.Task[Ended | Lost]]) -> bool:
    return any(isinstance(each.result(), Lost) for each in ended)


def _rank_as_cause(end: Ended | Lost) -> int:
    """Return a number that is lower for an end that explains those of the other members."""
    if isinstance(end, Lost):
        return 0
    return {WRONG_CONFIGURATION: 1, 0: 3}.get(end.status, 2)


def _result(reference: Any) -> Coroutine[Any, Any, Any]:
    async def awaited() -> Any:
        return await reference

    return awaited()


def _first_line(error: Exception) -> str:
    """Return the last sentence of Ray's message, which has the cause; those before are the same for all."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
