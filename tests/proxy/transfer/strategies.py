"""Strategies for records of sessions, with every field that they may have."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from proxy.contract.export import SESSION_FORMAT
from proxy.contract.identifiers import new_reward_id, new_session_id, new_turn_id
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import Continuation, FinishReason, SamplingParameters, TurnState
from proxy.transfer.conversation import messages_of, tools_of
from proxy.transfer.records import RewardRecord, SessionRecord, TurnRecord

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
_TIMES = st.integers(0, 2**31).map(float)
_HASHES = st.binary(min_size=16, max_size=16).map(bytes.hex)


_LOGPROBS = st.floats(-50, 0, width=32)
_CALLS = st.lists(
    st.fixed_dictionaries({"id": _TEXT, "call": st.fixed_dictionaries({"name": _TEXT, "arguments": _TEXT})}),
    max_size=2,
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[TurnRecord, ...]:
    made: list[TurnRecord] = []
    lengths: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.none() | st.integers(0, len(made) - 1)) if made else None
        prefix = draw(st.integers(0, lengths[parent])) if parent is not None else 0
        prompt, output = draw(_IDS), draw(_IDS)
        continuations = [kind for kind in Continuation if kind is not Continuation.NEW]
        turn_id = str(new_turn_id())
        own = len(prompt) + len(output)
        choice = {"turn_id": turn_id, "text": draw(_TEXT), "tool_calls": draw(_CALLS)}
        made.append(
            TurnRecord(
                id=turn_id,
                parent=parent,
                prefix_tokens=prefix,
                prompt_ids=prompt,
                output_ids=output,
                logprobs=tuple(draw(_LOGPROBS) for _ in output),
                versions=((draw(st.integers(0, 9)), 0, len(output)),) if output else (),
                masked=((0, own),) if own and draw(st.booleans()) else (),
                sampling=SamplingParameters(max_new_tokens=draw(st.integers(1, 99)), stop=(draw(_TEXT),)),
                finish_reason=draw(st.sampled_from(FinishReason)),
                continuation=Continuation.NEW if parent is None else draw(st.sampled_from(continuations)),
                state=draw(st.sampled_from(TurnState)),
                attributed_by="header",
                prompt_token_count=prefix + len(prompt),
                started_at=draw(_TIMES),
                first_token_at=draw(st.none() | _TIMES),
                finished_at=draw(_TIMES),
                conversation_hash=draw(_HASHES),
                settled_hash=draw(st.none() | _HASHES),
                tools_hash=draw(_HASHES),
                messages=[{"role": "user", "content": draw(_TEXT | st.just([{"type": "text", "text": "a"}]))}],
                request={"model": draw(_TEXT), "tools": draw(st.just([]) | st.just([{"type": "function"}]))},
                response={"choices": [choice]},
            )
        )
        lengths.append(prefix + own)
    return tuple(made)


@st.composite
def sessions(draw: st.DrawFn) -> SessionRecord:
    of = draw(turns())
    rewards = tuple(
        RewardRecord(
            id=str(new_reward_id()),
            turn=draw(st.none() | st.integers(0, len(of) - 1)) if of else None,
            name=draw(st.sampled_from(["reward", "style"])),
            value=draw(st.floats(-1e6, 1e6)) + 0.0,  # SQLite stores no negative zero
            source="api",
            comment=draw(st.none() | _TEXT),
            after_training=draw(st.booleans()),
            created_at=draw(_TIMES),
        )
        for _ in range(draw(st.integers(0, 3)))
    )
    created_at = draw(_TIMES)
    return SessionRecord(
        format=SESSION_FORMAT,
        session_id=str(new_session_id()),
        run="elsewhere",
        origin=None,
        external_id=draw(st.none() | _TEXT),
        group=draw(st.none() | st.sampled_from(["g1", "g2"])),
        group_size=None,
        task=draw(st.none() | _TEXT),
        purpose=draw(st.sampled_from(Purpose)),
        metadata=draw(st.none() | st.dictionaries(_TEXT, _TEXT | st.integers(-5, 5), max_size=2)),
        attributed_by="created",
        state="ended",
        training="consumed",
        outcome=draw(st.none() | st.sampled_from(["completed", "failed", "cancelled"])),
        end_reason="explicit",
        consumed_by=draw(st.none() | st.integers(0, 9)),
        reward=None,
        created_at=created_at,
        last_active_at=created_at,
        ended_at=created_at,
        messages=messages_of(of),
        tools=tools_of(of),
        turns=of,
        rewards=rewards,
    )


def comparable(record: SessionRecord) -> dict[str, Any]:
    """Return the parts of a record that are equal after an export and an import."""
    value: dict[str, Any] = msgspec.to_builtins(record)
    for name in ("session_id", "run", "origin", "attributed_by", "training", "consumed_by", "reward"):
        del value[name]
    for turn in value["turns"]:
        del turn["id"], turn["reward"]
        for choice in turn["response"]["choices"]:
            del choice["turn_id"]
    for reward in value["rewards"]:
        del reward["id"]
    return value
