from __future__ import annotations

import msgspec
import pytest

from proxy.contract.claim import decode, encode
from proxy.contract.trajectory import TrajectoryTurn
from tests.trainer import tiny


def test_numbers_arrive_as_they_were_sent() -> None:
    sent = tiny.turn((5, 70_000, 151_935), prompt=(1, 262_143), logprobs=(-0.5, -1.25, 0.0))
    received = decode(encode(sent), TrajectoryTurn)
    assert received == sent
    assert received.prompt_ids == (1, 262_143)
    assert received.output_ids == (5, 70_000, 151_935)
    assert received.logprobs == (-0.5, -1.25, 0.0)


@pytest.mark.parametrize("field", ["packed_prompt_ids", "packed_output_ids", "packed_logprobs"])
def test_bytes_that_are_nothing_packed_are_refused(field: str) -> None:
    sent = msgspec.to_builtins(tiny.turn((5, 6)), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError, match="no packed"):
        decode(msgspec.msgpack.encode({**sent, field: b"\x09\x01"}), TrajectoryTurn)
