from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.identifiers import TurnId
from proxy.contract.reward import NameRule, RewardRules, SourceRule
from proxy.lifecycle.combining import LedgerEntry, combine, revised_at, session_rewards, standing

NAMES = ("reward", "format", "speed")
SOURCES = ("api", "judge")


@st.composite
def ledgers(draw: st.DrawFn, *, turns: st.SearchStrategy[str | None] | None = None) -> list[LedgerEntry]:
    """Draw one session's entries, in order of arrival."""
    about = turns if turns is not None else st.none()
    drawn = draw(
        st.lists(
            st.tuples(about, st.sampled_from(NAMES), st.sampled_from(SOURCES), st.integers(-1000, 1000).map(float)),
            max_size=12,
        )
    )
    return [
        LedgerEntry(id=f"rwd_{number}", turn_id=turn, name=name, source=source, value=value, created_at=float(number))
        for number, (turn, name, source, value) in enumerate(drawn)
    ]


weights = st.dictionaries(st.sampled_from([*NAMES, "unused"]), st.integers(-3, 3).map(float))
orders = st.lists(st.sampled_from([*NAMES, "unused"]), min_size=1, unique=True).map(tuple)
rules = st.builds(
    RewardRules,
    weights=weights,
    combine=st.sampled_from(NameRule),
    sources=st.sampled_from(SourceRule),
    order=orders,
    required=st.just(()) | orders,
)
ANY_TURN = st.sampled_from([None, "t1", "t2"])


def by_name(ledger: list[LedgerEntry], rule: SourceRule) -> dict[str, float]:
    """Return the value of each name, computed in another way than the code does."""
    found: dict[str, float] = {}
    for name in NAMES:
        values = [
            [entry.value for entry in ledger if (entry.name, entry.source) == (name, source)] for source in SOURCES
        ]
        latest = [of_source[-1] for of_source in values if of_source]
        if latest:
            found[name] = sum(latest) / (len(latest) if rule is SourceRule.MEAN else 1)
    return found


@given(ledgers(), weights)
def test_by_default_the_reward_is_the_weighted_sum_of_the_latest_entries(
    ledger: list[LedgerEntry], by_weight: dict[str, float]
) -> None:
    parts = {name: by_weight.get(name, 1.0) * value for name, value in by_name(ledger, SourceRule.SUM).items()}
    takes_part = any(by_weight.get(name, 1.0) != 0 for name in parts)
    assert combine(ledger, RewardRules(weights=by_weight)) == (sum(parts.values()) if takes_part else None)


@given(ledgers(), rules)
def test_every_rule_computes_its_definition(ledger: list[LedgerEntry], given_rules: RewardRules) -> None:
    weight = {name: given_rules.weights.get(name, 1.0) for name in NAMES}
    values = {
        name: weight[name] * value
        for name, value in by_name(ledger, given_rules.sources).items()
        if weight[name] != 0
    }
    in_order = [values[name] for name in given_rules.order if name in values]
    of_all = list(values.values())
    expected: float | None
    if given_rules.combine is NameRule.FIRST_OF:
        expected = in_order[0] if in_order else None
    elif not of_all:
        expected = None
    elif given_rules.combine is NameRule.MEAN:
        expected = sum(of_all) / sum(abs(weight[name]) for name in values)
    elif given_rules.combine is NameRule.PRODUCT:
        expected = math.prod(of_all)
    else:
        functions: dict[NameRule, Callable[[list[float]], float]] = {
            NameRule.WEIGHTED_SUM: sum,
            NameRule.MIN: min,
            NameRule.MAX: max,
        }
        expected = float(functions[given_rules.combine](of_all))
    assert combine(ledger, given_rules) == (None if expected is None else pytest.approx(expected))


@given(ledgers(), rules, st.integers(-50, 50), st.integers(0, 100))
def test_the_combined_reward_is_within_its_bounds_and_absent_stays_absent(
    ledger: list[LedgerEntry], given_rules: RewardRules, low: int, width: int
) -> None:
    bounded = RewardRules(
        weights=given_rules.weights,
        combine=given_rules.combine,
        sources=given_rules.sources,
        order=given_rules.order,
        low=float(low),
        high=float(low + width),
    )
    free, clipped = combine(ledger, given_rules), combine(ledger, bounded)
    assert clipped == (None if free is None else min(max(free, low), low + width))


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=64), st.sampled_from(NameRule))
def test_the_largest_rewards_combine_to_a_finite_number(values: list[float], rule: NameRule) -> None:
    ledger = [
        LedgerEntry(id=f"r{number}", turn_id=None, name=f"n{number}", source="api", value=value, created_at=0.0)
        for number, value in enumerate(values)
    ]
    weighed = {entry.name: -1e12 for entry in ledger}
    combined = combine(ledger, RewardRules(weights=weighed, combine=rule, order=("n0",)))
    assert combined is not None
    assert math.isfinite(combined)
    assert abs(combined) <= 1e30


@given(ledgers(turns=ANY_TURN), ledgers(turns=ANY_TURN), rules)
def test_entries_that_are_superseded_change_nothing(
    ledger: list[LedgerEntry], later: list[LedgerEntry], given_rules: RewardRules
) -> None:
    whole = ledger + later
    kept = standing(whole)
    assert session_rewards(whole, given_rules) == session_rewards(kept, given_rules)
    assert not session_rewards(whole + kept, given_rules).differs_from(session_rewards(whole, given_rules))
    assert session_rewards(whole, given_rules).reward_ids == tuple(entry.id for entry in kept)


@given(ledgers(turns=ANY_TURN), rules)
def test_a_turns_rewards_are_its_own(ledger: list[LedgerEntry], given_rules: RewardRules) -> None:
    rewards = session_rewards(ledger, given_rules)
    assert rewards.reward == combine([entry for entry in ledger if entry.turn_id is None], given_rules)
    for turn in ("t1", "t2"):
        own = combine([entry for entry in ledger if entry.turn_id == turn], given_rules)
        assert rewards.turn_rewards.get(TurnId(turn)) == own
    numbers = rewards.reward is not None or bool(rewards.turn_rewards)
    assert rewards.may_be_trained(described=False) == (numbers and not rewards.missing)
    assert rewards.may_be_trained(described=True) == (not rewards.missing)
    assert set(rewards.missing) == set(given_rules.required) - {entry.name for entry in ledger}


@given(ledgers(turns=ANY_TURN), st.integers(0, 12), rules)
def test_a_reward_after_training_is_a_revision_only_if_a_number_changes(
    ledger: list[LedgerEntry], trained_on: int, given_rules: RewardRules
) -> None:
    before, after = ledger[:trained_on], ledger[trained_on:]
    used = session_rewards(before, given_rules)
    revised = revised_at(ledger, used.reward_ids, given_rules)
    assert (revised is not None) == session_rewards(ledger, given_rules).differs_from(used)
    if revised is not None:
        assert revised == after[-1].created_at
    assert revised_at(before, used.reward_ids, given_rules) is None
