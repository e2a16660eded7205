from __future__ import annotations

import msgspec
import pytest

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.claim import decode, encode
from proxy.contract.identifiers import TurnId
from proxy.contract.trajectory import TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan

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
    with pytest.raises(msgspec.ValidationError, match="no packed"):
        decode(msgspec.msgpack.encode({**sent, field: b"\x09\x01"}), TrajectoryTurn)
