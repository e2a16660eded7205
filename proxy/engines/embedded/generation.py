"""One request while it is generated. The model thread writes it; the HTTP side reads it and is woken by `notify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.engines.compiled_grammars import GrammarState
from proxy.engines.embedded.sampling import TopLogprobs
from proxy.engines.embedded.stopping import StopStrings
from proxy.engines.embedded.wire import SamplingRules


class Generation:
    """A request's ids, output and end.

    A reader takes `finish` first, then `len(logprobs)`, then slices: an id and its tops are appended before
    its log-probability, and all before `finish` is set, so what it has is whole. `tops` stay empty where they are not
    asked for. `spans` are [label, start, end] of past labels; the current one runs from `label_start`.
    """

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
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.rules = rules
        self.stop_ids = stop_ids
        self.stop_strings = stop_strings
        self.grammar = grammar
        self.stream = stream
        self.notify = notify
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []
        self.finish: dict[str, Any] | None = None
        self.failure: str | None = None
        self.arrival = 0
        self.retractions = 0
        self.final_label = ""
        self._label: str | None = None
        self._label_start = 0
        self._past: list[tuple[str, int, int]] = []

    @property
    def position(self) -> int:
        """Where the newest token stands, counted from the start of the prompt."""
        return len(self.prompt) + len(self.output) - 1

    def accept(self, token: int, logprob: float, label: str, top: TopLogprobs | None = None) -> None:
        """Takes the next token, drawn under the weights called `label`, and decides whether it is the last."""
        if label != self._label:
            self._close_span()
            self._label = label
        self.output.append(token)
        if top is not None:
            self.tops.append(top)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = {"type": "stop", "matched": token}
            return
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.stop_strings is not None and (matched := self.stop_strings.matched(self.output)) is not None:
            self.finish = {"type": "stop", "matched": matched}
        elif len(self.output) >= self.rules.max_new_tokens:
            self.finish = {"type": "length", "length": len(self.output)}

    def abort(self, message: str, status: int | None = None) -> None:
        """Ends the request with what it has; with a `status`, as a refusal of what was asked."""
        self.finish = {"type": "abort", "message": message, "status_code": status, "err_type": None}

    def fail(self, message: str) -> None:
        """Ends the request with an error of ours."""
        self.failure = message
        self.abort(message)

    def spans(self) -> list[dict[str, Any]]:
        """Which weights produced which output tokens; in order, without gaps. For a finished request."""
        self._close_span()
        return [{"version": label, "start": start, "end": end} for label, start, end in self._past]

    def _close_span(self) -> None:
        end = len(self.output)
        if self._label is not None and end > self._label_start:
            self._past.append((self._label, self._label_start, end))
        self._label_start = end
