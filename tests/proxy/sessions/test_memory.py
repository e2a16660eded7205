from __future__ import annotations

import pytest

from proxy.contract.identifiers import KeyId, RunId, SessionId, TurnId
from proxy.contract.trajectory import Purpose
from proxy.sessions import memory as module
from proxy.sessions.identification import AttributedBy, SessionContext
from proxy.sessions.memory import FRESH_SECONDS, KnownSession, SessionMemory
from tests.proxy.store import MovedClock

RUN, KEY = RunId("run"), KeyId("key")
HASH = b"h" * 16
BOTH = (SessionId("a"), SessionId("b"))


class Kept:
    def __init__(self) -> None:
        self.clock = MovedClock()
        self.memory = SessionMemory(self.clock)

    def put(self, session_id: str, *, name: str | None = None, is_open: bool = True) -> KnownSession:
        as_of = self.memory.as_of_now()
        context = SessionContext(
            id=SessionId(session_id),
            run_id=RUN,
            purpose=Purpose.TRAIN,
            attributed_by=AttributedBy.NEW,
            group_id=None,
            key_id=KEY,
        )
        known = self.memory.put(context, external_id=name, is_open=is_open, as_of=as_of)
        if name is not None:
            self.memory.put_name(RUN, name, context.id, as_of)
        return known

    def continued(self) -> str | None:
        known = self.memory.continued(KEY, HASH)
        return known.context.id if known is not None else None


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_an_open_session_is_known_by_its_name_for_a_moment(kept: Kept) -> None:
    known = kept.put("a", name="mine")
    assert kept.memory.by_name(RUN, "mine") is known
    assert kept.memory.by_name(RunId("other"), "mine") is None
    kept.clock.now += FRESH_SECONDS
    assert kept.memory.by_name(RUN, "mine") is None
    assert kept.memory.has_known_name(RUN, "mine")
    kept.memory.seen_open(SessionId("a"), kept.memory.as_of_now())
    assert kept.memory.by_name(RUN, "mine") is known


def test_the_id_is_known_permanently_within_its_run(kept: Kept) -> None:
    known = kept.put("a")
    kept.clock.now += 1000
    assert kept.memory.by_id(SessionId("a")) is kept.memory.by_name(RUN, "a") is known
    assert kept.memory.by_name(RunId("other"), "a") is None


def test_an_end_is_heard_of_at_once(kept: Kept) -> None:
    kept.put("a", name="mine")
    kept.memory.forget(["a", "unknown"])
    assert kept.memory.by_name(RUN, "mine") is None


def test_an_end_that_came_while_the_store_was_read_is_not_overlooked(kept: Kept) -> None:
    known = kept.put("a", name="mine")
    as_of = kept.memory.as_of_now()
    kept.memory.forget(["a"])
    kept.memory.put(known.context, external_id="mine", is_open=True, as_of=as_of)
    assert kept.memory.by_name(RUN, "mine") is None
    kept.memory.put(known.context, external_id="mine", is_open=True, as_of=kept.memory.as_of_now())
    assert kept.memory.by_name(RUN, "mine") is not None, "the end of another session, say: it is open"


def test_an_ended_session_has_its_name_until_another_may_have_it(kept: Kept) -> None:
    known = kept.put("a", name="mine", is_open=False)
    kept.memory.seen_open(SessionId("a"), kept.memory.as_of_now())
    assert kept.memory.by_name(RUN, "mine") is known
    assert not known.is_open
    kept.clock.now += FRESH_SECONDS
    assert kept.memory.by_name(RUN, "mine") is None


def test_equal_conversations_are_continued_in_turn(kept: Kept) -> None:
    for session_id in "abc":
        kept.put(session_id)
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    kept.memory.add_conversation(KEY, HASH, SessionId("a"))
    assert [kept.continued() for _ in range(4)] == ["c", "b", "a", "c"]
    assert kept.memory.continued(KeyId("other"), HASH) is None
    assert kept.memory.continued(KEY, b"-" * 16) is None


def test_continuations_are_counted_from_the_stores_figures(kept: Kept) -> None:
    for session_id in "ab":
        kept.put(session_id)
    kept.memory.put_conversation(KEY, HASH, {SessionId("a"): 2, SessionId("b"): 0}, exact=BOTH)
    assert [kept.continued() for _ in range(3)] == ["b", "b", "b"]
    kept.memory.put_conversation(KEY, HASH, {SessionId("a"): 0, SessionId("b"): 1}, exact=BOTH)
    assert kept.continued() == "a", "what was counted here counts"


def test_sessions_with_a_name_come_after_those_without(kept: Kept) -> None:
    kept.put("named", name="mine")
    kept.put("bare")
    for session_id in ("named", "bare"):
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    assert [kept.continued() for _ in range(3)] == ["bare"] * 3


def test_sessions_that_hold_a_conversation_exactly_come_first(kept: Kept) -> None:
    for session_id in ("nearly", "exactly"):
        kept.put(session_id)
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id), exact=session_id == "exactly")
    assert [kept.continued() for _ in range(2)] == ["exactly"] * 2
    kept.memory.add_conversation(KEY, HASH, SessionId("nearly"))
    assert kept.continued() == "nearly", "it does too, now, and was not continued yet"
    kept.memory.put_conversation(KEY, HASH, {SessionId("nearly"): 9, SessionId("exactly"): 0}, exact=())
    assert kept.continued() == "exactly"


def test_an_open_session_comes_before_an_ended_one(kept: Kept) -> None:
    kept.put("open")
    kept.put("ended", is_open=False)
    for session_id in ("ended", "open"):
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    assert [kept.continued() for _ in range(2)] == ["open", "open"]


def test_an_attempt_that_failed_does_not_count(kept: Kept) -> None:
    for session_id in "ab":
        kept.put(session_id)
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    assert kept.continued() == "b"
    kept.memory.settled(KEY, HASH, SessionId("b"), recorded=False)
    assert kept.continued() == "b", "it is tried again in its session"
    kept.memory.settled(KEY, HASH, SessionId("b"), recorded=True)
    assert kept.continued() == "a"


def test_the_session_of_the_trace_comes_first_among_open_ones(kept: Kept) -> None:
    for session_id in "abc":
        kept.put(session_id, is_open=session_id != "c")
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    for traced, found in (("a", "a"), ("c", "b"), ("elsewhere", "b")):
        known = kept.memory.continued(KEY, HASH, SessionId(traced))
        assert known is not None
        assert known.context.id == found
        kept.memory.settled(KEY, HASH, known.context.id, recorded=False)


def test_a_turn_names_its_session_within_the_run(kept: Kept) -> None:
    kept.put("a")
    turn = TurnId("turn_1")
    assert kept.memory.by_turn(RUN, turn) is None
    kept.memory.put_turn(turn, SessionId("a"))
    known = kept.memory.by_turn(RUN, turn)
    assert known is not None
    assert known.context.id == "a"
    assert kept.memory.by_turn(RunId("other"), turn) is None
    kept.clock.now += FRESH_SECONDS
    assert kept.memory.by_turn(RUN, turn) is None, "it may have ended in another process"


def test_a_conversation_that_may_have_ended_is_not_certain(kept: Kept) -> None:
    kept.put("a")
    kept.memory.add_conversation(KEY, HASH, SessionId("a"))
    kept.memory.forget(["a"])
    assert kept.continued() is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("_SESSIONS", "_CONVERSATIONS", "_EQUAL_CONVERSATIONS"):
        monkeypatch.setattr(module, bound, 2)
    kept = Kept()
    for session_id in "abc":
        kept.put(session_id, name=session_id.upper())
        kept.memory.add_conversation(KEY, session_id.encode() * 16, SessionId(session_id))
    assert kept.memory.by_id(SessionId("a")) is None
    assert kept.memory.by_name(RUN, "A") is None
    assert kept.memory.by_name(RUN, "C") is not None
    assert kept.memory.continued(KEY, b"a" * 16) is None
    for session_id in "abc":
        kept.memory.add_conversation(KEY, HASH, SessionId(session_id))
    assert kept.continued() == "c", "the newest two are kept"
