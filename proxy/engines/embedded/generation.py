"""One request while it is generated: the model thread writes it, the HTTP side reads it after `notify`."""

from __future__ import annotations

from collections.abc import Callable

from proxy.engines.common import replies
from proxy.engines.common.grammar_compiler import GrammarState
from proxy.engines.embedded.lora import Adapter
from proxy.engines.embedded.sampling import TopLogprobs
from proxy.engines.embedded.stopping import StopStrings
from proxy.engines.embedded.wire import SamplingRules


class Generation:
    """The ids, output and end of one request. `tops` stay empty unless the request asks for them. `adapter` is None
    for the base model alone."""

    # Two threads share it without a lock. The model thread appends an id and its top tokens before the id's
    # log-probability, and sets `finish` after all of them. A reader takes `finish` first, then `len(logprobs)`, then
    # slices of that length, so it never sees a token in part.

    def __init__(
        self,
        *,
        rid: str,
        prompt: list[int],
        rules: SamplingRules,
        stop_ids: frozenset[int],
        stop_strings: StopStrings | None,
        grammar: GrammarState | None,
        stream: bool,
        notify: Callable[[], None],
        adapter: Adapter | None = None,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.rules = rules
        self.stop_ids = stop_ids
        self.stop_strings = stop_strings
        self.grammar = grammar
        self.stream = stream
        self.notify = notify
        self.adapter = adapter
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []
        self.spans = replies.WeightSpans()
        self.finish: replies.Finish | None = None
        self.failure: str | None = None
        self.arrival = 0
        self.retractions = 0
        self.final_label = ""

    @property
    def position(self) -> int:
        """The position of the newest token, counted from the start of the prompt."""
        return len(self.prompt) + len(self.output) - 1

    def label(self, base: str) -> str:
        """Return the label of the weights that produce the next token; `base` is the label of the base model."""
        return base if self.adapter is None else self.adapter.name

    def accept(self, token: int, logprob: float, label: str, top: TopLogprobs | None = None) -> None:
        """Append the next token, drawn under the weights labelled `label`, and decide whether it is the last."""
        self.output.append(token)
        self.spans.extend(label, len(self.output))
        if top is not None:
            self.tops.append(top)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = replies.stopped(token)
            return
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.stop_strings is not None and (matched := self.stop_strings.matched(self.output)) is not None:
            self.finish = replies.stopped(matched)
        elif len(self.output) >= self.rules.max_new_tokens:
            self.finish = replies.full_length(len(self.output))

    def abort(self, message: str, status: int | None = None) -> None:
        """End the request with the tokens produced so far; with a `status`, as a refusal of the request."""
        self.finish = replies.aborted(message, status)

    def fail(self, message: str) -> None:
        """End the request with an error of the engine's."""
        self.failure = message
        self.abort(message)
