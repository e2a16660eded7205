"""Check scripted answers against constraints. A script cannot adapt its answer, so one that breaks them is
refused."""

from __future__ import annotations

import asyncio

import llguidance

from proxy.bounded_cache import BoundedCache
from proxy.contract.turn import Constraint, ConstraintKind
from proxy.engines.common.grammar_compiler import GrammarCompiler
from proxy.engines.common.wire import RequestRefused
from proxy.tokens.template import ChatTemplate

_REMEMBERED = 256
# Characters of an answer in an error message.
_SHOWN = 120


class ConstraintCheck:
    """Checks answers of one tokenizer with llguidance, and remembers the results.

    Raises ValueError if llguidance cannot read the tokenizer.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._compiler = GrammarCompiler(
            template.tokenizer.to_str(), vocabulary=template.vocabulary_size, eos_ids=template.stop_ids
        )
        self._decode = template.tokenizer.decode
        self._faults: BoundedCache[tuple[Constraint, tuple[int, ...], bool], str] = BoundedCache(_REMEMBERED)
        """The fault of an answer; empty if it obeys its constraint."""

    async def check(self, constraint: Constraint, ids: tuple[int, ...], *, number: int, whole: bool) -> None:
        """Check that an answer obeys the constraint. An answer that is not `whole` must be the start of one that
        does.

        Raises RequestRefused with the place of the fault, and GrammarRefused for an invalid constraint.
        """
        key = (constraint, ids, whole)
        fault = self._faults.get(key)
        if fault is None:
            state = await self._compiler.compile(constraint, ())
            # In a thread: validating a long answer would stop all other answers.
            fault = await asyncio.to_thread(self._fault, state.matcher, ids, whole=whole) or ""
            self._faults.put(key, fault)
        if fault:
            raise RequestRefused(
                f"the script answers this by rule {number}, which breaks the {constraint.kind.value} that the "
                f"request asks for: {fault}. {_cause(constraint.kind)}"
            )

    def _fault(self, matcher: llguidance.LLMatcher, ids: tuple[int, ...], *, whole: bool) -> str | None:
        fitting = matcher.validate_tokens(list(ids))
        if fitting < len(ids):
            return f"after {self._shown(ids[:fitting])} it says {self._shown(ids[fitting : fitting + 1])}"
        matcher.consume_tokens(list(ids))
        return f"it ends too early, after {self._shown(ids)}" if whole and not matcher.is_accepting() else None

    def _shown(self, ids: tuple[int, ...]) -> str:
        text: str = self._decode(ids, skip_special_tokens=False)
        return repr(text if len(text) <= _SHOWN else f"… {text[-_SHOWN:]}")


def _cause(kind: ConstraintKind) -> str:
    """Return which part of a client's request leads to a constraint of this kind, and what to do."""
    if kind is ConstraintKind.JSON_SCHEMA:
        return "An answer format in the client's request asks for it: script JSON that obeys its schema"
    return (
        'A tool with "strict": true, tool_choice, or an answer format in the client\'s request asks for it: script '
        "a call whose arguments obey the tool's schema, or let the client send tools that are not strict"
    )
