from __future__ import annotations

import msgspec
import pytest

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.claim import decode, encode
from proxy.contract.identifiers import TurnId
from proxy.contract.trajectory import TrajectoryTurn
from proxy.contract.turn import Cut, FinishReason, LogprobConvention, TurnState, VersionSpan

SENT = TrajectoryTurn(
    id=TurnId("turn_1"),
    parent=None,
    prefix_tokens=0,
    packed_prompt_ids=pack_ids((1, 262_143)),
    packed_output_ids=pack_ids((5, 70_000, 151_935)),
    packed_logprobs=pack_logprobs((-0.5, -1.25, 0.0)),
    spans=(VersionSpan(version=0, start=0, end=3),),
    temperature=1.0,
    convention=LogprobConvention.SAMPLED,
    trainable=True,
)


def test_numbers_arrive_as_they_were_sent() -> None:
    received = decode(encode(SENT), TrajectoryTurn)
    assert received == SENT
    assert received.prompt_ids == (1, 262_143)
    assert received.output_ids == (5, 70_000, 151_935)
    assert received.logprobs == (-0.5, -1.25, 0.0)


@pytest.mark.parametrize("field", ["packed_prompt_ids", "packed_output_ids", "packed_logprobs"])
def test_bytes_that_are_nothing_packed_are_refused(field: str) -> None:
    sent = msgspec.to_builtins(SENT, builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError, match="not packed"):
        decode(msgspec.msgpack.encode({**sent, field: b"\x09\x01"}), TrajectoryTurn)


def test_a_turn_without_a_finish_reason_is_not_cut() -> None:
    sent = msgspec.to_builtins(SENT, builtin_types=(bytes,))
    old = {name: value for name, value in sent.items() if name not in ("finish_reason", "state")}
    received = decode(msgspec.msgpack.encode(old), TrajectoryTurn)
    assert (received.finish_reason, received.state, received.cut) == (None, TurnState.COMPLETE, None)
    assert received == SENT


@pytest.mark.parametrize(
    ("finish_reason", "state", "cut"),
    [
        (FinishReason.STOP, TurnState.COMPLETE, None),
        (FinishReason.TOOL_CALLS, TurnState.COMPLETE, None),
        (FinishReason.LENGTH, TurnState.COMPLETE, Cut.LENGTH),
        (FinishReason.LENGTH, TurnState.TRUNCATED, Cut.INTERRUPTED),
        (FinishReason.STOP, TurnState.TRUNCATED, None),  # it had ended by itself when its client disconnected
    ],
)
def test_the_reason_of_a_cut_follows_from_the_answers_end(
    finish_reason: FinishReason, state: TurnState, cut: Cut | None
) -> None:
    ended = msgspec.structs.replace(SENT, finish_reason=finish_reason, state=state)
    assert decode(encode(ended), TrajectoryTurn).cut is cut
