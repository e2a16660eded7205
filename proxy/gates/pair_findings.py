"""What gates find by pairs of answers to the same prompts, a candidate's and the serving version's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.gates.curves import share_curve
from proxy.gates.findings import GUARDS, Finding, FindingState, guard_bounds
from proxy.gates.sequential import Interval, compare_pairs, interval
from proxy.settings import ReleaseSettings

_EVEN = 0.5
"""The share of wins of a candidate that is as good as the serving version."""


class PairSample(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of a candidate's answers and those of the version `against`.

    `new` and `old` have a value in [0, 1] of each pair by guard, in the order in which the pairs were recorded.
    `preferences` has a value of each pair that the judge has compared, in the order in which it did: 1 if it prefers
    the candidate's answer, 0 for the other one, 0.5 for neither. Of `inconsistent` further pairs it named the same
    place in both orders: it has compared nothing, so they count for neither side. `unjudged` pairs wait for the
    judge; `problem` is why an attempt at one of them failed.
    """

    against: int
    pairs: int = 0
    failed: int = 0
    new: Mapping[str, tuple[float, ...]] = {}
    old: Mapping[str, tuple[float, ...]] = {}
    preferences: tuple[float, ...] = ()
    inconsistent: int = 0
    unjudged: int = 0
    problem: str | None = None


def shadow_finding(release: ReleaseSettings, sample: PairSample) -> Finding:
    """Fail a candidate of which a guarded value is surely higher than the serving version's on the same prompts, by
    more than its bound. It passes after `shadow.answers` pairs. Each guard gets an equal part of the error rate."""
    wanted, bounds = release.shadow.answers, guard_bounds(release.guards)
    problems: list[str] = []
    rises: list[str] = []
    evidence: dict[str, Any] = {
        "against": sample.against,
        "pairs": sample.pairs,
        "failed": sample.failed,
        "error_rate": release.error_rate,
        "guards": {},
    }
    for name, bound in bounds.items():
        new, old = sample.new.get(name, ()), sample.old.get(name, ())
        if not new:
            continue
        means = sum(new) / len(new), sum(old) / len(old)
        evidence["guards"][name] = {"bound": bound, "new": means[0], "old": means[1]}
        # A rise of the means is no proof, but without one there is none: most comparisons end here, at no cost.
        if means[0] - means[1] <= bound:
            continue
        differences = [one - other for one, other in zip(new, old, strict=True)]
        found = compare_pairs(differences, release.error_rate / len(bounds), width=1.0)
        evidence["guards"][name] |= {"difference": found.mean, "low": found.low, "high": found.high}
        rise = f"{GUARDS[name]} is {means[0]:.3f}, and {means[1]:.3f} of version {sample.against}"
        if found.low > bound:
            problems.append(f"{rise}, surely higher by more than {bound:g}")
        else:
            rises.append(rise)
    if problems:
        text = f"{'; '.join(problems)} ({sample.pairs} answers to the same prompts)"
        return Finding(gate="shadow", state="failed", text=text, evidence=evidence)
    seen = "; ".join(rises) or "nothing that is guarded is higher by more than its bound"
    if sample.pairs < wanted:
        room = f"the candidate answers while {_room(release.shadow.busy_share)} (shadow.busy_share)"
        text = f"waits for {wanted} unseen answers, {sample.pairs} now; {room}"
        if sample.pairs:
            text = f"{text}: {seen}"
        return Finding(gate="shadow", state="waiting", text=text, evidence=evidence)
    text = f"on {sample.pairs} prompts, {seen}"
    return Finding(gate="shadow", state="passed", text=text, evidence=evidence)


def preference_finding(release: ReleaseSettings, sample: PairSample) -> Finding:
    """Compare the candidate's share of wins with one half.

    It fails as soon as the share is surely below, and passes as soon as it is surely not below by `max_loss`; each
    conclusion is wrong with probability at most the error rate. Once the judge has answered about `shadow.answers`
    pairs, `undecided` decides.
    """
    wanted, values = release.preference, sample.preferences
    share = sum(values) / len(values) if values else None
    found = interval(values, release.error_rate)
    evidence = {
        "judge": wanted.judge,
        "against": sample.against,
        "comparisons": len(values),
        "better": sum(value > _EVEN for value in values),
        "worse": sum(value < _EVEN for value in values),
        "inconsistent": sample.inconsistent,
        "unjudged": sample.unjudged,
        "share": share,
        "low": found.low,
        "high": found.high,
        "error_rate": release.error_rate,
        "curve": share_curve(values, release.error_rate, centre=_EVEN),
    }

    def finding(state: FindingState, text: str) -> Finding:
        return Finding(gate="preference", state=state, text=text, evidence=evidence)

    asked = len(values) + sample.inconsistent
    seen = _seen(str(wanted.judge), share, found, sample)
    if found.high < _EVEN:
        return finding("failed", f"it is worse: {seen}")
    if found.low > _EVEN - wanted.max_loss:
        return finding("passed", f"it is not worse by {wanted.max_loss:g}: {seen}")
    if asked >= release.shadow.answers:
        state: FindingState = "passed" if wanted.undecided == "promote" else "failed"
        return finding(state, f"no preference was found (preference.undecided): {seen}")
    text = (
        f"waits for a clear answer, or {release.shadow.answers} pairs, of which the judge has answered about {asked}"
    )
    return finding("waiting", f"{text}{_delay(sample)}{f': {seen}' if asked else ''}")


def _room(busy_share: float) -> str:
    """Return the condition under which a candidate may answer. A gate that waits shows it, because under steady load
    the candidate never may."""
    return f"calls hold at most {busy_share:g} of its engine's slots" if busy_share else "its engine has no calls"


def _seen(judge: str, share: float | None, found: Interval, sample: PairSample) -> str:
    """Return what the judge has said. A judge that chooses by the order of the answers says nothing, so the pairs in
    which it did are named."""
    count = sample.inconsistent
    if share is None:
        return f"the judge {judge!r} chose by their order in all of {count} pairs, which therefore do not count"
    text = (
        f"the judge {judge!r} prefers its answers in {share:.3f} of {len(sample.preferences)} pairs (between"
        f" {found.low:.3f} and {found.high:.3f}) with version {sample.against}"
    )
    return f"{text}; {count} more do not count, because the judge chose by their order" if count else text


def _delay(sample: PairSample) -> str:
    """Return how many pairs wait for the judge, and why, as a further clause."""
    if not sample.unjudged:
        return ""
    reason = f" (its last attempt failed: {sample.problem})" if sample.problem is not None else ""
    return f", {sample.unjudged} wait for it{reason}"
