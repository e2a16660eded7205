"""What gates find about a version, from evidence to a finding. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from proxy.gates.curves import difference_curve
from proxy.gates.sequential import Comparison, compare, compare_pairs
from proxy.settings import GuardSettings, ReleaseSettings

FindingState = Literal["waiting", "passed", "failed"]

GUARDS: dict[str, str] = {
    "failed_calls": "share of failed calls",
    "broken_tool_calls": "share of answers with a tool call that cannot be read",
    "cut_answers": "share of answers cut at their bound on tokens",
    "answer_length": "length of answers as a share of max_new_tokens",
    "refusals": "share of refusals",
    "slow_calls": "share of slow calls",
}
"""The guarded values of a session, each in [0, 1] and better if lower, with their names for people."""

# A finding names these metrics of the step as the trainer reports them.
_BOUNDS = {
    "kl_behaviour_max": ("kl_behaviour", 1.0),
    "kl_reference_max": ("kl_reference", 1.0),
    "entropy_min": ("entropy", -1.0),
    "entropy_max": ("entropy", 1.0),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one gate has found about a version: whether it passed, and why, as a sentence and as numbers."""

    gate: str
    state: FindingState
    text: str
    evidence: dict[str, Any] = {}


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Ended sessions that one side of a comparison answered alone, in the order in which they ended.

    `rewards` are those of the rewarded ones; `guards` has a value in [0, 1] of every session by guard.
    """

    versions: tuple[int, ...]
    rewards: tuple[float, ...]
    guards: Mapping[str, tuple[float, ...]] = {}
    sessions: int = 0


def bounds_finding(release: ReleaseSettings, metrics: Mapping[str, float | None]) -> Finding:
    """Compare the metrics of a step with the bounds on them."""
    problems = []
    shown: dict[str, float | None] = {}
    for name, bound in release.bounds.model_dump().items():
        if bound is None:
            continue
        metric, sign = _BOUNDS[name]
        value = shown[metric] = metrics.get(metric)
        if value is None:
            problems.append(f"the step did not report {metric}, which bounds.{name} bounds")
        elif sign * value > sign * bound:
            problems.append(f"{metric} is {value:.4g}, and bounds.{name} is {bound:.4g}")
    text = "; ".join(problems) or "the metrics of its step are within their bounds"
    return Finding(gate="bounds", state="failed" if problems else "passed", text=text, evidence={"metrics": shown})


def evaluation_finding(
    release: ReleaseSettings,
    new: Mapping[str, float],
    old: Mapping[str, float],
    *,
    against: int,
    earlier: Mapping[int, Mapping[str, float]] | None = None,
) -> Finding:
    """Compare the mean rewards by task of a candidate with those of the serving version `against`, on the tasks that
    both have attempted, and with those of `earlier` served versions.

    A policy that loses a little with each version would pass every comparison with the version before it. The
    comparisons share the error rate in equal parts.
    """
    wanted = release.evaluation
    results = {against: old, **(earlier or {})}
    shared = {version: sorted(new.keys() & found.keys()) for version, found in results.items()}
    ready = [version for version in results if version == against or len(shared[version]) >= wanted.tasks]
    found = {
        version: compare_pairs(
            [new[task] - results[version][task] for task in shared[version]],
            release.error_rate / len(ready),
            width=release.reward_high - release.reward_low,
        )
        for version in ready
    }
    tasks = len(shared[against])
    evidence = {
        **_numbers(found[against]),
        "suite": wanted.suite,
        "against": against,
        "tasks": tasks,
        "better": sum(new[task] > old[task] for task in shared[against]),
        "worse": sum(new[task] < old[task] for task in shared[against]),
        "earlier": {str(version): _numbers(each) for version, each in found.items() if version != against},
    }
    if tasks < wanted.tasks:
        text = (
            f"waits for results of the suite {wanted.suite!r}: {wanted.tasks} tasks are needed with results of both"
            f" it ({len(new)} now) and version {against} ({len(old)} now)"
        )
        return Finding(gate="evaluation", state="waiting", text=text, evidence=evidence)
    # The serving version comes first, and is named unless only a comparison with an earlier one failed.
    failed = [each for each in ready if found[each].high < 0 and (found[each].mean or 0.0) < -wanted.max_drop]
    version = failed[0] if failed else against
    text = (
        f"on {len(shared[version])} tasks of {wanted.suite!r} its mean reward is {found[version].mean:+.3f} against"
        f" version {version} (between {found[version].low:+.3f} and {found[version].high:+.3f})"
    )
    return Finding(gate="evaluation", state="failed" if failed else "passed", text=text, evidence=evidence)


def canary_finding(release: ReleaseSettings, new: Arm, old: Arm) -> Finding:
    """Compare the rewards of canary sessions with those of the serving version meanwhile.

    It fails as soon as its mean is surely lower, and passes as soon as its mean is surely not lower by `max_drop`;
    each conclusion is wrong with probability at most the error rate.
    """
    wanted = release.canary
    found = compare(new.rewards, old.rewards, release.error_rate, low=release.reward_low, high=release.reward_high)
    evidence = _arms(release, found, new, old, release.error_rate)
    numbers = f"{len(new.rewards)} canary sessions against {len(old.rewards)} of version {_named(old.versions)}"
    if found.mean is None:
        text = f"waits for rewarded sessions: {numbers}"
        return Finding(gate="canary", state="waiting", text=text, evidence=evidence)
    difference = f"mean reward {found.mean:+.3f} (between {found.low:+.3f} and {found.high:+.3f}), {numbers}"
    if found.high < 0:
        return Finding(gate="canary", state="failed", text=f"it is worse: {difference}", evidence=evidence)
    if found.low > -wanted.max_drop:
        text = f"it is not worse by {wanted.max_drop:g}: {difference}"
        return Finding(gate="canary", state="passed", text=text, evidence=evidence)
    if len(new.rewards) >= wanted.sessions:
        text = f"no difference was found in {wanted.sessions} canary sessions (canary.undecided): {difference}"
        state: FindingState = "passed" if wanted.undecided == "promote" else "failed"
        return Finding(gate="canary", state=state, text=text, evidence=evidence)
    text = f"waits for a clear answer, or {wanted.sessions} canary sessions: {difference}"
    return Finding(gate="canary", state="waiting", text=text, evidence=evidence)


def guards_finding(
    release: ReleaseSettings, new: Arm, old: Arm, *, error: float | None = None, waits: bool = False
) -> Finding:
    """Fail a version of which a guarded value is surely higher than before by more than its bound.

    Each guard gets an equal part of `error`, by default the error rate. Guards pass until one fails; with `waits`, a
    value that is higher by more than its bound, and not surely, holds the version back until it had
    `canary.sessions`: a canary with lucky rewards would be promoted before the guards can tell.
    """
    bounds = guard_bounds(release.guards)
    error = release.error_rate if error is None else error
    problems: list[str] = []
    doubts: list[str] = []
    evidence: dict[str, Any] = {"sessions": new.sessions, "against": old.sessions, "guards": {}}
    for name, bound in bounds.items():
        values, before = new.guards.get(name, ()), old.guards.get(name, ())
        after_mean, before_mean = _mean(values), _mean(before)
        evidence["guards"][name] = {"bound": bound, "new": after_mean, "old": before_mean}
        # A rise of the means is no proof, but without one there is none: most comparisons end here, at no cost.
        if after_mean is None or before_mean is None or after_mean - before_mean <= bound:
            continue
        found = compare(values, before, error / len(bounds))
        evidence["guards"][name] |= _numbers(found)
        rise = f"{GUARDS[name]} rose from {before_mean:.3f} to {after_mean:.3f}"
        if found.low > bound:
            problems.append(f"{rise}, surely by more than {bound:g}")
        else:
            doubts.append(rise)
    if waits and doubts and not problems and new.sessions < release.canary.sessions:
        text = f"waits for a clear answer, or {release.canary.sessions} canary sessions: {'; '.join(doubts)}"
        return Finding(gate="guards", state="waiting", text=text, evidence=evidence)
    text = "; ".join(problems) or f"nothing that is guarded has risen in {new.sessions} sessions"
    return Finding(gate="guards", state="failed" if problems else "passed", text=text, evidence=evidence)


def watch_finding(release: ReleaseSettings, suspects: Arm, before: Arm, *, is_drawn: bool = True) -> Finding:
    """Compare sessions of a served version, and of those made from it, with sessions of its predecessors.

    `failed` means that the run is to be rolled back to the version before the suspects. `is_drawn`: the evidence has
    a curve, which costs as much as the test.

    A run tests each of its versions, so the test of one gets a small part of the error rate; rewards and guards get
    half of that each.
    """
    bound = release.rollback.max_drop
    assert bound is not None, "the watch is on"
    numbers = (
        f"{len(suspects.rewards)} sessions of version {_named(suspects.versions)} against {len(before.rewards)} of"
        f" version {_named(before.versions)}"
    )
    error = release.error_rate / release.rollback.versions
    if guard_bounds(release.guards):
        error /= 2
    guards = guards_finding(release, suspects, before, error=error)
    if not is_drawn and guards.state == "passed" and not _has_fallen(release, suspects, before, bound):
        return Finding(gate="watch", state="passed", text=numbers)
    found = compare(suspects.rewards, before.rewards, error, low=release.reward_low, high=release.reward_high)
    evidence = {**_arms(release, found, suspects, before, error, is_drawn=is_drawn), "max_drop": bound}
    if found.mean is not None and found.high < -bound:
        text = (
            f"the mean reward fell by {-found.mean:.3f}, surely by more than {bound:g} (rollback.max_drop): {numbers}"
        )
        return Finding(gate="watch", state="failed", text=text, evidence=evidence)
    evidence["guards"] = guards.evidence["guards"]
    if guards.state == "failed":
        return Finding(gate="watch", state="failed", text=f"{guards.text}: {numbers}", evidence=evidence)
    change = "no rewards yet" if found.mean is None else f"mean reward {found.mean:+.3f}"
    return Finding(gate="watch", state="passed", text=f"{change}, {numbers}", evidence=evidence)


def _has_fallen(release: ReleaseSettings, new: Arm, old: Arm, bound: float) -> bool:
    """Return whether the mean of the clipped rewards is lower by more than `bound`: else no test shows a fall."""
    low, high = release.reward_low, release.reward_high
    means = [_mean([min(high, max(low, reward)) for reward in arm.rewards]) for arm in (new, old)]
    return means[0] is not None and means[1] is not None and means[0] - means[1] < -bound


def guard_bounds(guards: GuardSettings) -> dict[str, float]:
    """Return the bounds of the guards that are on, by name."""
    return {name: bound for name in GUARDS if (bound := getattr(guards, name)) is not None}


def _arms(
    release: ReleaseSettings, found: Comparison, new: Arm, old: Arm, error: float, *, is_drawn: bool = True
) -> dict[str, Any]:
    return {
        **_numbers(found),
        "new": {"versions": new.versions, "sessions": len(new.rewards), "reward": _mean(new.rewards)},
        "old": {"versions": old.versions, "sessions": len(old.rewards), "reward": _mean(old.rewards)},
        "error_rate": error,
        "curve": difference_curve(release, new.rewards, old.rewards, error) if is_drawn else [],
    }


def _numbers(found: Comparison) -> dict[str, float | None]:
    return {"difference": found.mean, "low": found.low, "high": found.high}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _named(versions: Sequence[int]) -> str:
    if not versions:
        return "none"
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
