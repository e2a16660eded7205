"""Constraints: a script cannot be made to say what a request asks for, but an answer that breaks it is refused."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import llguidance

from proxy.contract.turn import Constraint
from proxy.engines.compiled_grammars import GrammarCompiler
from proxy.engines.scripted.wire import RequestRefused
from proxy.tokens.template import ChatTemplate

_KEPT = 256
_SHOWN = 120


class ConstraintCheck:
    """Holds answers of one tokenizer against constraints, by llguidance, and remembers what it found.

    Raises ValueError when the tokenizer is none that llguidance can read.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._compiler = GrammarCompiler(
            template.tokenizer.to_str(), vocabulary=template.vocabulary_size, eos_ids=template.stop_ids
        )
        self._decode = template.tokenizer.decode
        self._found: OrderedDict[tuple[Constraint, tuple[int, ...], bool], str | None] = OrderedDict()

    async def check(self, constraint: Constraint, ids: tuple[int, ...], *, number: int, whole: bool) -> None:
        """Of an answer that is not `whole` it must be possible to go on. Raises RequestRefused, with the place, and
        GrammarRefused where the constraint is none."""
        key = (constraint, ids, whole)
        if key not in self._found:
            state = await self._compiler.compile(constraint, ())
            fault = await asyncio.to_thread(self._fault, state.matcher, ids, whole=whole)
            self._found[key] = fault
            while len(self._found) > _KEPT:
                self._found.popitem(last=False)
        if (fault := self._found[key]) is not None:
            raise RequestRefused(
                f"the script answers this by rule {number}, which breaks the {constraint.kind.value} that the "
                f"request asks for: {fault}"
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
