"""Any sequence of turns, rewards, claims, commits, crashes, repetitions and jumps of the clock, at two proxies, whose
clocks may differ, trains each trajectory at most once and loses none, and no turn and no reward."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import text

from proxy.auth.service import Principal, PrincipalKind
from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest, CommitReply, CommitRequest
from proxy.contract.identifiers import ClaimId, GroupId, KeyId, SessionId, new_reward_id
from proxy.errors import Conflict
from proxy.feedback.service import FeedbackItem, FeedbackService, Receipt
from proxy.turns.service import TurnRecord
from proxy.versions.service import VersionService
from tests.database import needs_postgresql, postgresql_database, sqlite_database
from tests.proxy.store import MovedClock
from tests.proxy.turns.world import World, open_world
from tests.proxy.versions.publishing import commit_request, inspector, publish

_Result = TypeVar("_Result")

LEASE = 100.0
GROUP_TIMEOUT = 30.0

PROCESSES = ("one", "two")

PICK = st.integers(0, 11)
PICKS = st.lists(PICK, min_size=1, max_size=2)


class AheadClock(MovedClock):
    """A clock that is ahead of another one."""

    def __init__(self, right: MovedClock, seconds: float) -> None:
        self._right = right
        self._seconds = seconds

    def __call__(self) -> float:
        return self._right() + self._seconds


class Proxy:
    """The services of one process, with caches of their own."""

    def __init__(self, world: World) -> None:
        self.world = world
        wiring = {"database": world.database, "clock": world.clock, "signals": world.signals}
        self.claims = ClaimService(**wiring)  # type: ignore[arg-type]
        self.versions = VersionService(**wiring, inspector=inspector())  # type: ignore[arg-type]
        self.feedback = FeedbackService(world.database, world.signals, world.clock)


class TrainingAccounts(RuleBasedStateMachine):
    """Trainers and clients around a real SQLite file with two proxies on it; each request may go to either, and
    either may be replaced at any moment. The clock of the second one is ahead by `ahead` seconds."""

    ahead = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.databases = ExitStack()
        self.url = self.new_database()
        self.clock = MovedClock()
        self.groups: list[GroupId] = []
        self.unrewarded: list[SessionId] = []
        self.batches: dict[ClaimId, list[SessionId]] = {}
        """Sessions that trainers received, by claim."""
        self.of_process: dict[str, list[ClaimId]] = {process: [] for process in PROCESSES}
        self.requests: list[CommitRequest] = []
        self.acknowledged: dict[tuple[tuple[ClaimId, ...], str], int] = {}
        self.sessions: list[SessionId] = []
        self.turns: dict[SessionId, list[TurnRecord]] = {}
        """Acknowledged turns, in order."""
        self.rewards: dict[str, tuple[FeedbackItem, Receipt]] = {}
        """Acknowledged rewards by idempotency key."""
        self.latest = self.clock.now
        self.run_(self._start())

    def new_database(self) -> str:
        return sqlite_database(self.directory)

    def run_(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self.runner.run(work)

    async def _start(self) -> None:
        self.stack = AsyncExitStack()
        options = {"lease_seconds": LEASE, "group_timeout_seconds": GROUP_TIMEOUT}
        self.proxies = [
            Proxy(await self.stack.enter_async_context(open_world(self.url, clock=clock, **options)))
            for clock in (self.clock, AheadClock(self.clock, self.ahead))
        ]
        self._ask(self.proxies[0])

    def _ask(self, proxy: Proxy) -> None:
        """Send further requests to this proxy."""
        self.world, self.claims, self.versions = proxy.world, proxy.claims, proxy.versions
        self.feedback = proxy.feedback

    def teardown(self) -> None:
        try:
            self.run_(self._everything_trainable_is_claimable())
        finally:
            self.run_(self.stack.aclose())
            self.runner.close()
            shutil.rmtree(self.directory)
            self.databases.close()

    async def _head(self) -> int:
        return (await self.versions.head(self.world.run)).version

    async def _claim(self, want: int, process: str | None = None) -> ClaimedBatch:
        wish = ClaimRequest(trainer="t", process=process, want=want, max_staleness=10_000)
        return await self.claims.claim(self.world.run, wish)

    async def _commit(self, request: CommitRequest) -> CommitReply | None:
        """Commit, and return None if the commit is refused."""
        try:
            return await self.versions.commit(self.world.run, request)
        except Conflict:
            return None

    def _acknowledge(self, request: CommitRequest, reply: CommitReply | None) -> None:
        if reply is None:
            return
        made = (tuple(sorted(request.claim_ids)), request.weights.sha256)
        assert self.acknowledged.setdefault(made, reply.version) == reply.version

    async def _request(self, claim_ids: list[ClaimId], *, behind: int = 0) -> CommitRequest:
        weights = publish(self.directory)
        request = commit_request(claim_ids, await self._head() - behind, weights)
        self.requests.append(request)
        return request

    def _picked(self, picks: list[int]) -> list[ClaimId]:
        """Return claims by number. The order in which trainers claim is not determined, so nothing that Hypothesis
        draws may depend on what was claimed."""
        known = list(self.batches)
        return list(dict.fromkeys(known[pick % len(known)] for pick in picks)) if known else []

    # --- clients

    @initialize()
    def some_sessions(self) -> None:
        for _ in range(3):
            self.session(grouped=False, size=None)
            self.reward(value=1.0, first=True)

    @rule(grouped=st.booleans(), size=st.sampled_from([None, 1, 2, 3]))
    def session(self, grouped: bool, size: int | None) -> None:
        async def act() -> None:
            group = None
            if grouped:
                if size is not None or not self.groups:
                    self.groups.append(await self.world.group(size=size))
                group = self.groups[-1]
            session = await self.world.session(group=group)
            self.sessions.append(session)
            self.unrewarded.append(session)

        self.run_(act())
        self.turn(pick=len(self.sessions) - 1, continues=False, repetitions=1)

    @precondition(lambda self: self.sessions)
    @rule(pick=PICK, continues=st.booleans(), repetitions=st.integers(1, 2))
    def turn(self, pick: int, continues: bool, repetitions: int) -> None:
        """Record a turn of a session, which may have ended and been trained long ago. A repeated recording is the
        same turn."""
        session = self.sessions[pick % len(self.sessions)]
        known = self.turns.setdefault(session, [])
        if continues and known:
            record = self.world.record(session, parent=known[-1], prefix_tokens=4, prompt_ids=(7,))
        else:
            record = self.world.record(session)
        for _ in range(repetitions):
            self.run_(self.world.store.record(record))
        known.append(record)

    @precondition(lambda self: self.unrewarded)
    @rule(value=st.sampled_from([0.0, 1.0]), first=st.booleans())
    def reward(self, value: float, first: bool) -> None:
        session = self.unrewarded.pop(0 if first else -1)
        self._rewarded(
            FeedbackItem(entries=(("reward", value),), session_id=session, idempotency_key=new_reward_id())
        )

    @precondition(lambda self: self.sessions)
    @rule(pick=PICK, value=st.sampled_from([0.0, 0.5]), of_turn=st.booleans())
    def another_reward(self, pick: int, value: float, of_turn: bool) -> None:
        """Post an early, late or revised reward that does not end the session."""
        session = self.sessions[pick % len(self.sessions)]
        known = self.turns[session]
        self._rewarded(
            FeedbackItem(
                entries=(("reward", value), ("style", -value)),
                session_id=session,
                turn_id=known[pick % len(known)].turn.id if of_turn else None,
                final=False,
                idempotency_key=new_reward_id(),
            )
        )

    @precondition(lambda self: self.rewards)
    @rule(pick=PICK)
    def a_reward_whose_answer_was_lost(self, pick: int) -> None:
        """The reward is posted again and gets the first answer."""
        key = list(self.rewards)[pick % len(self.rewards)]
        item, receipt = self.rewards[key]
        assert self.run_(self.feedback.record(self._customer(), [item])) == [receipt]

    def _rewarded(self, item: FeedbackItem) -> None:
        (receipt,) = self.run_(self.feedback.record(self._customer(), [item]))
        assert item.idempotency_key is not None
        self.rewards[item.idempotency_key] = (item, receipt)

    def _customer(self) -> Principal:
        return Principal(key_id=KeyId("key_test"), kind=PrincipalKind.RUN, run_id=self.world.run_id, session_id=None)

    # --- trainers

    @rule(want=st.integers(1, 4), process=st.sampled_from([None, *PROCESSES]))
    def claim(self, want: int, process: str | None) -> None:
        batch = self.run_(self._claim(want, process))
        self._handed(batch)
        if batch.claim_id is not None and process is not None:
            self.of_process[process].append(batch.claim_id)

    @rule(process=st.sampled_from(PROCESSES))
    def a_trainer_is_found_dead(self, process: str) -> None:
        """Its claims are released, and no other trainer's."""

        async def act() -> None:
            released = (await self.claims.release_abandoned(self.world.run, process)).claim_ids
            assert set(released) <= set(self.of_process[process])
            for claim_id in released:
                with suppress(Conflict):
                    await self.claims.heartbeat(self.world.run, claim_id)
                    raise AssertionError("it is leased still")

        self.run_(act())

    @rule(wants=st.lists(st.integers(1, 3), min_size=2, max_size=3))
    def claims_at_once(self, wants: list[int]) -> None:
        async def act() -> list[ClaimedBatch]:
            return await asyncio.gather(*(self._claim(want) for want in wants))

        for batch in self.run_(act()):
            self._handed(batch)

    def _handed(self, batch: ClaimedBatch) -> None:
        sessions = [trajectory.session_id for group in batch.groups for trajectory in group.trajectories]
        assert len(set(sessions)) == len(sessions)
        if batch.claim_id is not None:
            self.batches[batch.claim_id] = sessions

    @rule(want=st.integers(1, 4))
    def claim_whose_answer_is_lost(self, want: int) -> None:
        self.run_(self._claim(want))

    @rule(pick=PICK)
    def heartbeat(self, pick: int) -> None:
        async def act() -> None:
            for claim_id in self._picked([pick]):
                try:
                    lease = await self.claims.heartbeat(self.world.run, claim_id)
                except Conflict:
                    continue
                assert lease.lease_expires_at == self.world.clock() + LEASE

        self.run_(act())

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        async def act() -> None:
            for claim_id in self._picked([pick]):
                with suppress(Conflict):
                    await self.claims.release(self.world.run, claim_id)

        self.run_(act())

    @rule(picks=PICKS, behind=st.sampled_from([0, 0, 0, 1]))
    def commit(self, picks: list[int], behind: int) -> None:
        claim_ids = self._picked(picks)

        async def act() -> None:
            if not claim_ids:
                return
            request = await self._request(claim_ids, behind=behind)
            reply = await self._commit(request)
            assert reply is None or (behind == 0 and not reply.repeated)
            self._acknowledge(request, reply)

        self.run_(act())

    @rule(picks=PICKS)
    def commit_whose_answer_is_lost(self, picks: list[int]) -> None:
        claim_ids = self._picked(picks)

        async def act() -> None:
            if claim_ids:
                await self._commit(await self._request(claim_ids))

        self.run_(act())

    @rule(pick=PICK)
    def commit_again(self, pick: int) -> None:
        if not self.requests:
            return
        request = self.requests[pick % len(self.requests)]
        known = self.acknowledged.get((tuple(sorted(request.claim_ids)), request.weights.sha256))
        reply = self.run_(self._commit(request))
        if known is not None:
            assert reply == CommitReply(version=known, repeated=True)
        self._acknowledge(request, reply)

    @rule(first_picks=PICKS, second_picks=PICKS)
    def two_trainers_commit_at_once(self, first_picks: list[int], second_picks: list[int]) -> None:
        first, second = self._picked(first_picks), self._picked(second_picks)

        async def act() -> None:
            if not first:
                return
            requests = [await self._request(first), await self._request(second)]
            replies = await asyncio.gather(*(self._commit(request) for request in requests))
            assert sum(reply is not None for reply in replies) <= 1
            for request, reply in zip(requests, replies, strict=True):
                self._acknowledge(request, reply)

        self.run_(act())

    # --- the world

    @rule(seconds=st.sampled_from([1.0, GROUP_TIMEOUT, LEASE - 1, LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.latest = max(self.latest, self.clock.now)

    @rule(seconds=st.sampled_from([1.0, LEASE, 10 * LEASE]))
    def clock_is_set_back_and_the_proxies_restart(self, seconds: float) -> None:
        """Within one process, time never goes back (`proxy.clock`)."""
        self.clock.now -= seconds
        self.proxy_restarts()

    @rule()
    def the_other_proxy_is_asked(self) -> None:
        self._ask(next(proxy for proxy in self.proxies if proxy.claims is not self.claims))

    @rule()
    def sweep(self) -> None:
        self.run_(self.claims.sweep())

    @rule()
    def proxy_restarts(self) -> None:
        async def act() -> None:
            await self.stack.aclose()
            await self._start()

        self.run_(act())

    # --- what always holds

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.run_(self._check_accounts())

    async def _query(self, statement: str) -> list[Any]:
        return await self.world.database.read(lambda connection: list(connection.execute(text(statement)).all()))

    async def _check_accounts(self) -> None:
        in_claims = await self._query(
            "SELECT c.state, s.session_id, c.id, c.committed_version FROM claimed_sessions s "
            "JOIN claims c ON c.id = s.claim_id WHERE c.state IN ('committed', 'leased')"
        )
        by_session: dict[str, list[Any]] = {}
        for row in in_claims:
            by_session.setdefault(row.session_id, []).append(row)
        for row in await self._query("SELECT id, training, claim_id, consumed_by FROM sessions"):
            holders = by_session.get(row.id, [])
            if row.training in ("leased", "consumed"):
                (holder,) = holders
                assert holder.state == {"leased": "leased", "consumed": "committed"}[row.training]
                assert holder.id == row.claim_id
                assert holder.committed_version == row.consumed_by
            else:
                assert holders == []
                assert (row.claim_id, row.consumed_by) == (None, None)
        versions = await self._query(
            "SELECT version, parent_version, claim_ids FROM policy_versions ORDER BY version"
        )
        assert [row.version for row in versions] == list(range(len(versions)))
        assert [row.parent_version for row in versions] == [None, *range(len(versions) - 1)]
        assert await self._head() == len(versions) - 1
        assert set(self.acknowledged.values()) <= {row.version for row in versions}
        await self._check_turns_and_rewards()
        committed = {row.id: row.committed_version for row in in_claims if row.state == "committed"}
        for (claim_ids, _sha256), version in self.acknowledged.items():
            assert {committed[claim_id] for claim_id in claim_ids} == {version}
            for claim_id in claim_ids:
                sessions = {row.session_id for row in in_claims if row.id == claim_id}
                assert sessions == set(self.batches[claim_id])

    async def _check_turns_and_rewards(self) -> None:
        """Check that each is stored once, with the acknowledged content."""
        stored: dict[str, list[str]] = {session: [] for session in self.sessions}
        for row in await self._query("SELECT id, session_id, ordinal FROM turns ORDER BY session_id, ordinal"):
            assert row.ordinal == len(stored[row.session_id])
            stored[row.session_id].append(row.id)
        assert stored == {session: [record.turn.id for record in self.turns[session]] for session in self.sessions}
        counts = {row.id: row.turn_count for row in await self._query("SELECT id, turn_count FROM sessions")}
        assert counts == {session: len(known) for session, known in self.turns.items()}
        entries = {row.id: row.value for row in await self._query("SELECT id, value FROM rewards")}
        acknowledged = {
            reward_id: value
            for item, receipt in self.rewards.values()
            for reward_id, (_, value) in zip(receipt.rewards, item.entries, strict=True)
        }
        assert entries == acknowledged

    async def _everything_trainable_is_claimable(self) -> None:
        for session in self.unrewarded:
            await self.world.reward(session, 0.0)
        self.clock.now = self.latest + self.ahead + LEASE + GROUP_TIMEOUT
        await self.claims.sweep()
        consumed = {row.id for row in await self._query("SELECT id FROM sessions WHERE training = 'consumed'")}
        everything = {row.id for row in await self._query("SELECT id FROM sessions")}
        handed: set[str] = set()
        while (batch := await self._claim(4)).claim_id is not None:
            sessions = {trajectory.session_id for group in batch.groups for trajectory in group.trajectories}
            assert not sessions & handed
            handed |= sessions
        assert handed == everything - consumed


class AccountsByTwoClocks(TrainingAccounts):
    """The same with clocks that differ by more than a lease: the second proxy ends leases early, and the first one
    believes those that the second grants to be long."""

    ahead = 3 * LEASE


class PostgresqlAccounts(TrainingAccounts):
    """The same test on PostgreSQL."""

    def new_database(self) -> str:
        return self.databases.enter_context(postgresql_database())


_SLOWLY = [HealthCheck.too_slow]

TestTrainingAccounts = TrainingAccounts.TestCase
TestTrainingAccounts.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=_SLOWLY
)

TestAccountsByTwoClocks = AccountsByTwoClocks.TestCase
TestAccountsByTwoClocks.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=_SLOWLY
)

TestPostgresqlAccounts = needs_postgresql(PostgresqlAccounts.TestCase)
TestPostgresqlAccounts.settings = settings(
    max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=_SLOWLY
)
