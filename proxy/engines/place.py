"""A place that answers calls: an engine, its calls under way, and the adapter that they name."""

from __future__ import annotations

import msgspec

from proxy.engines.protocol import Engine, EngineChunk
from proxy.engines.slots import EngineSlots


class EngineLoad:
    """The calls at one engine. `slots` bounds how many of this process generate at once; `calls` is the number of
    this process's calls under way, those that wait for a slot included, and `outstanding_tokens` the sum of their
    prompts and allowed new tokens. `tokens_elsewhere` is that sum for the other proxies' calls, some seconds old."""

    def __init__(self, slots: EngineSlots) -> None:
        self.slots = slots
        self.calls = 0
        self.outstanding_tokens = 0
        self.tokens_elsewhere = 0


class EnginePlace:
    """An engine that serves a run, and the name of the adapter that the run's calls ask for; None for whole weights.

    `base_labels` is given where the run's version 0 is answered by the base model that an engine shares between runs:
    the engine's own label of it, and the label that the version has. `calls` is the number of calls under way here:
    what they use must not be unloaded.
    """

    def __init__(
        self,
        engine: Engine,
        load: EngineLoad,
        *,
        adapter: str | None = None,
        base_labels: tuple[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.load = load
        self.adapter = adapter
        self.base_labels = base_labels
        self.calls = 0

    def begin(self, tokens: int) -> None:
        """Count a call whose prompts and allowed new tokens are `tokens` together."""
        self.calls += 1
        self.load.calls += 1
        self.load.outstanding_tokens += tokens

    def end(self, tokens: int) -> None:
        """Count the end of a call that began with `tokens`."""
        self.calls -= 1
        self.load.calls -= 1
        self.load.outstanding_tokens -= tokens

    def labelled(self, chunk: EngineChunk) -> EngineChunk:
        """Return the chunk with the run's label of version 0 where the engine wrote its own label of the base."""
        if self.base_labels is None or not chunk.spans:
            return chunk
        theirs, ours = self.base_labels
        spans = [msgspec.structs.replace(span, label=ours) if span.label == theirs else span for span in chunk.spans]
        return msgspec.structs.replace(chunk, spans=tuple(spans))
