from __future__ import annotations

import time

import pytest

from proxy.contract.identifiers import created_at, least_turn_id, new_session_id, new_turn_id


def test_an_identifier_tells_when_it_was_made() -> None:
    before = time.time()
    identifier = new_turn_id()
    assert before - 0.001 <= created_at(identifier) <= time.time()
    assert created_at(new_session_id()) >= created_at(identifier)


@pytest.mark.parametrize("at", [0.0, 0.001, 1_790_000_000.123, 2.0**38])
def test_the_least_of_a_time_was_made_then(at: float) -> None:
    assert created_at(least_turn_id(at)) == pytest.approx(at, abs=0.001)
