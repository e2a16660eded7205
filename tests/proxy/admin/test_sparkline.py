from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.sparkline import HEIGHT, WIDTH, sparkline


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40))
def test_every_point_lies_within_the_picture(values: list[float]) -> None:
    points = [tuple(map(float, point.split(","))) for point in sparkline(values).split()]
    assert len(points) == (max(2, len(values)) if values else 0)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_usual_rewards_have_fixed_bounds() -> None:
    assert sparkline([0.0, 1.0]) == "2.0,22.0 98.0,2.0"
    assert sparkline([0.5]) == "2.0,12.0 98.0,12.0"
    assert sparkline([-0.5, 0.0]) == "2.0,17.0 98.0,12.0"
    assert sparkline([7.0]) == sparkline([-1e-300 - 5]) == "2.0,12.0 98.0,12.0"
