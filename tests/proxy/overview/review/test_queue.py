from __future__ import annotations

from typing import Any

from proxy.overview.review.queue import ENOUGH, Observed, queue_of


def seen(name: str, **values: Any) -> Observed:
    usual = {"task": None, "reward": 1.0, "ended_at": 0.0, "judge": None, "spread": 0.0, "mean_logprob": -0.5}
    return Observed(id=name, **{**usual, **values})


def test_sessions_come_with_their_reasons_those_with_most_first_and_new_before_old() -> None:
    usual = [seen(f"usual {number}", mean_logprob=-0.5 - 0.01 * (number % 3)) for number in range(ENOUGH)]
    queue = queue_of(
        [
            *usual,
            seen("old", reward=-1.0, ended_at=1.0),
            seen("new", judge="helpful", spread=0.75, ended_at=2.0),
            seen("strange", mean_logprob=-3.456, reward=-0.1),
            seen("unrewarded", reward=None),
        ],
        limit=10,
    )
    assert [(each.id, each.reasons) for each in queue] == [
        ("strange", ("negative reward", "unusually low log-probability, -3.46 per token")),
        ("new", ("votes of judge helpful differ by 0.75",)),
        ("old", ("negative reward",)),
    ]
    assert len(queue_of([seen(str(number), reward=-1.0) for number in range(9)], limit=5)) == 5


def test_few_or_equal_log_probabilities_are_not_low() -> None:
    few = [seen(str(number), mean_logprob=-0.1) for number in range(ENOUGH - 2)]
    assert queue_of([*few, seen("low", mean_logprob=-9.0)], limit=10) == []
    assert queue_of([seen(str(number)) for number in range(ENOUGH)], limit=10) == []
    assert queue_of([seen(str(number), mean_logprob=None) for number in range(ENOUGH)], limit=10) == []
