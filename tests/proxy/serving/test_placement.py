"""Which engine serves which run."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import RunId
from proxy.serving.placement import PlaceableEngine, PlaceableRun, place_runs

MODELS = st.sampled_from(["small", "large"])


def run(name: str, model: str = "small", *, by_adapter: bool = False) -> PlaceableRun:
    return PlaceableRun(id=RunId(name), base_model=model, by_adapter=by_adapter)


def engine(name: str, model: str = "small", of: str | None = None) -> PlaceableEngine:
    return PlaceableEngine(name=name, base_model=model, run=None if of is None else RunId(of))


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[PlaceableEngine], list[PlaceableRun]]:
    runs = [
        run(f"r{number}", draw(MODELS), by_adapter=draw(st.booleans())) for number in range(draw(st.integers(0, 6)))
    ]
    owners = st.one_of(st.none(), st.sampled_from([each.id for each in runs]) if runs else st.none(), st.just("gone"))
    count = draw(st.integers(0, 6))
    return [engine(f"e{number}", draw(MODELS), draw(owners)) for number in range(count)], runs


@given(pools())
def test_an_engine_serves_runs_that_it_can_serve(pool: tuple[list[PlaceableEngine], list[PlaceableRun]]) -> None:
    engines, runs = pool
    known = {each.id: each for each in runs}
    placed = place_runs(engines, runs)
    assert set(placed) == {each.name for each in engines}
    for each in engines:
        of_engine = [known[run_id] for run_id in placed[each.name]]
        if each.run is not None:
            assert [of.id for of in of_engine] == ([each.run] if each.run in known else [])
        else:
            assert all(of.base_model == each.base_model for of in of_engine)
        assert len(of_engine) <= 1 or all(of.by_adapter for of in of_engine), "whole weights are alone"


@given(pools())
def test_no_run_waits_while_an_engine_of_its_model_is_idle(
    pool: tuple[list[PlaceableEngine], list[PlaceableRun]],
) -> None:
    engines, runs = pool
    placed = place_runs(engines, runs)
    served = Counter(run_id for of_engine in placed.values() for run_id in of_engine)
    dedicated = {each.run for each in engines}
    for each in engines:
        if each.run is not None or placed[each.name]:
            continue
        assert not [
            of for of in runs if of.base_model == each.base_model and of.id not in dedicated and not served[of.id]
        ]


@given(pools())
def test_a_younger_run_never_takes_the_only_engine_of_an_older_one(
    pool: tuple[list[PlaceableEngine], list[PlaceableRun]],
) -> None:
    engines, runs = pool
    before = place_runs(engines, runs[:-1])
    after = place_runs(engines, runs)
    kinds = {each.id: each.by_adapter for each in runs}
    for older in runs[:-1]:
        was = any(older.id in of_engine for of_engine in before.values())
        now = any(older.id in of_engine for of_engine in after.values())
        # A run of whole weights takes the place of shared adapters: it cannot share.
        assert now or not was or kinds[older.id]


def test_one_engine_each_then_adapters_share_what_is_left() -> None:
    runs = [run("old"), run("a", by_adapter=True), run("young"), run("b", by_adapter=True)]
    placed = place_runs([engine("1"), engine("2"), engine("3"), engine("4")], runs)
    assert placed == {"1": ("old",), "2": ("young",), "3": ("a", "b"), "4": ("a", "b")}


def test_without_adapter_runs_every_engine_has_a_run() -> None:
    placed = place_runs([engine("1"), engine("2"), engine("3")], [run("old"), run("young")])
    assert placed == {"1": ("old",), "2": ("young",), "3": ("old",)}


def test_a_run_with_an_engine_of_its_own_takes_no_shared_one() -> None:
    placed = place_runs([engine("own", of="a"), engine("shared")], [run("a"), run("b")])
    assert placed == {"own": ("a",), "shared": ("b",)}
