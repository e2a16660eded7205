from __future__ import annotations

from proxy.admin.calibration import HEIGHT, WIDTH, calibration
from proxy.judges.agreement import agreement_of


def test_dots_lie_on_the_ideal_line_if_people_agree_and_within_the_picture_if_not() -> None:
    agreed = calibration(
        agreement_of([(n / 10, n / 10) for n in range(11)], low=0, high=1).calibration, low=0, high=1
    )
    assert agreed is not None
    (x0, y0), (x1, y1) = (tuple(map(float, place.split(","))) for place in agreed.ideal.split())
    for dot in agreed.dots:
        assert abs((dot.x - x0) / (x1 - x0) - (dot.y - y0) / (y1 - y0)) < 0.01
    assert (x0 < x1, y0 > y1, len(agreed.dots)) == (True, True, 5)
    far = calibration(agreement_of([(0.5, -100.0), (0.9, 100.0)] * 3, low=0, high=1).calibration, low=0, high=1)
    assert far is not None
    assert all(dot.x - dot.radius >= 0 and dot.x + dot.radius <= WIDTH for dot in far.dots)
    assert all(dot.y - dot.radius >= 0 and dot.y + dot.radius <= HEIGHT for dot in far.dots)
    assert [label for _, label in far.down] == ["-100", "0", "100"]


def test_there_is_no_picture_of_too_few_pairs() -> None:
    assert calibration(agreement_of([(0.5, 0.5)], low=0, high=1).calibration, low=0, high=1) is None
