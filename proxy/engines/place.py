"""Where calls are answered: an engine, the work that it has under way, and the adapter to ask for."""

from __future__ import annotations

from proxy.engines.activity import EngineSlots
from proxy.engines.protocol import Engine


class EngineLoad:
    """This process's calls at one engine. `slots` bounds how many generate at once; `outstanding_tokens` is the sum
    of the prompts and the allowed new tokens of all calls under way, those that wait for a slot included."""

    def __init__(self, slots: EngineSlots) -> None:
        self.slots = slots
        self.outstanding_tokens = 0


class EnginePlace:
    """An engine that serves a run, and the name of the adapter that the run's calls ask for; None for whole weights.

    `calls` is the number of calls under way here: what they use must not be unloaded.
    """

    def __init__(self, engine: Engine, load: EngineLoad, *, adapter: str | None = None) -> None:
        self.engine = engine
        self.load = load
        self.adapter = adapter
        self.calls = 0

    def begin(self, tokens: int) -> None:
        """Count a call whose prompts and allowed new tokens are `tokens` together."""
        self.calls += 1
        self.load.outstanding_tokens += tokens

    def end(self, tokens: int) -> None:
        """Count the end of a call that began with `tokens`."""
        self.calls -= 1
        self.load.outstanding_tokens -= tokens
