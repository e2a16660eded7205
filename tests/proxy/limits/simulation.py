"""A simulation of proxies that share limits, without a database: they trade with the levels in turn."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.limits.share import Levels, Rates, Refusal, Share, Standing, trade


class Proxies:
    """Proxies on one run. `now` is the time; each proxy's clock has an offset from it."""

    def __init__(self, rates: Rates, count: int, offsets: Sequence[float] = ()) -> None:
        self.rates = rates
        self.levels = Levels()
        self.now = 1_800_000_000.0
        self.trades = 0
        self._shares = [Share(rates) for _ in range(count)]
        self._offsets = [*offsets, *[0.0] * (count - len(offsets))]

    def call(self, proxy: int, *, waiting: int = 1) -> Refusal | None:
        """Begin a call at a proxy. Return None, or the refusal."""
        share, now = self._shares[proxy], self.now + self._offsets[proxy]
        refusal = share.refusal(now)
        if refusal is not None or share.use_call(now):
            return refusal
        self.trades += 1
        wanted = share.wanted(waiting, now)
        traded = trade(self.levels, self.rates, calls=wanted, tokens=share.owed, now=now)
        self.levels = traded.levels
        share.receive(traded, now)
        refusal = share.refusal(now)
        if refusal is None:
            assert share.use_call(now), "neither refused nor granted"
        return refusal

    def used(self, proxy: int, tokens: int) -> None:
        self._shares[proxy].owed += tokens

    def standings(self, proxy: int) -> tuple[Standing, ...]:
        return self._shares[proxy].standings(self.now + self._offsets[proxy])

    def pay(self, proxy: int) -> None:
        share = self._shares[proxy]
        now = self.now + self._offsets[proxy]
        traded = trade(self.levels, self.rates, calls=0, tokens=share.owed, now=now)
        self.levels = traded.levels
        share.paid(traded)


def most_in_any_window(events: Sequence[tuple[float, float]], unit_seconds: float) -> float:
    """Return the burst that would have been needed: the maximum, over all windows, of the units used minus those that
    flowed in. `events` are (time, units), in order."""
    most = lowest = total = 0.0
    for index, (when, amount) in enumerate(events):
        before = total - when / unit_seconds
        lowest = before if index == 0 else min(lowest, before)
        total += amount
        most = max(most, total - when / unit_seconds - lowest)
    return most
