"""Compile constraints with llguidance: which tokens may come next in an answer.

A thread of its own compiles a constraint, which is then remembered for the next request with the same one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import llguidance
import msgspec

from proxy.bounded_cache import BoundedCache
from proxy.contract.turn import Constraint, ConstraintKind
from proxy.grammars.structural_tag import LARK_HEAD

MOST_CHARACTERS = 1 << 20
MOST_LINES = 2000
"""Largest grammar. llguidance resolves its rules and a schema's references by recursion: a grammar far larger than
any real one would take minutes, or more stack than `STACK_BYTES`."""
STACK_BYTES = 512 << 20
"""Stack of every thread that compiles or follows a grammar; a stack uses memory only as far as it grows."""
COMPILE_SECONDS = 10.0
"""Longest wait for one grammar; real ones take milliseconds."""
# One more than needed: a thread that compiles a hostile grammar cannot be stopped.
_COMPILE_THREADS = 2
_REMEMBERED = 64
_SHOWN_CHARACTERS = 600
LIMITS = llguidance.LLParserLimits(verbose_errors=False)

_OWN_PLACE = re.compile(r"\A(at )?\d+\(\d+\): |\n +\d+ \|[^\n]*(?=\n|\Z)|\n +\^\s*\Z|\n<non-verbose/>")


class GrammarRefused(Exception):
    """The constraint is not a valid grammar, or too large. The message says why."""


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] | str = msgspec.field(default_factory=dict)


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: list[_Structure]
    triggers: list[str]


class GrammarState:
    """The position of one request in its grammar. Only the thread that generates uses it.

    The model's end tokens, `eos_ids`, are allowed exactly where the answer may end; so are the request's `stop_ids`.
    """

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int], stop_ids: list[int]) -> None:
        self.matcher = matcher
        self.eos_ids = eos_ids
        self.stop_ids = stop_ids

    @property
    def failure(self) -> str | None:
        """The reason why there is no next mask: the grammar needs more time or memory for a step than allowed; or
        None."""
        return _shown(self.matcher.get_error()) if self.matcher.is_error() else None

    def accept(self, token: int) -> None:
        """Advance by a token that is not an end token."""
        self.matcher.consume_token(token)


class GrammarCompiler:
    """Compiles constraints for one model. `eos_ids` are the model's end tokens, `vocabulary` the number of logits.

    Raises ValueError if llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer_json: str, *, vocabulary: int, eos_ids: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._eos_ids = sorted(eos_ids)
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=self._eos_ids)
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
        self._compiled: BoundedCache[Constraint, llguidance.LLMatcher] = BoundedCache(_REMEMBERED)

    async def compile(self, constraint: Constraint, stop_ids: Collection[int]) -> GrammarState:
        """Return the state at the start of an answer. Raises GrammarRefused for an invalid or too large grammar."""
        matcher = self._compiled.get(constraint)
        if matcher is None:
            matcher = await self._compile_in_thread(constraint)
            self._compiled.put(constraint, matcher)
        return GrammarState(
            matcher.deep_copy(), self._eos_ids, [each for each in stop_ids if each < self._vocabulary]
        )

    async def _compile_in_thread(self, constraint: Constraint) -> llguidance.LLMatcher:
        kind = constraint.kind.value
        if len(constraint.text) > MOST_CHARACTERS:
            raise GrammarRefused(f"{kind}: longer than {MOST_CHARACTERS} characters.")
        if constraint.text.count("\n") > MOST_LINES and constraint.kind is ConstraintKind.EBNF:
            raise GrammarRefused(f"{kind}: more than {MOST_LINES} lines.")
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint)
        try:
            return await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError as error:
            raise GrammarRefused(f"{kind}: not compiled within {COMPILE_SECONDS:.0f} seconds.") from error

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        kind, text = constraint.kind, constraint.text
        try:
            grammar = _grammar_of(kind, text)
        except (ValueError, AssertionError) as error:
            raise GrammarRefused(f"Failed to compile {kind.value} grammar: {_shown(str(error))}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        # Some faults show only with the first mask, for example a grammar that nothing matches.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise GrammarRefused(f"Failed to compile {kind.value} grammar: {_shown(first.get_error())}")
        return matcher


def _grammar_of(kind: ConstraintKind, text: str) -> str:
    """Return the constraint in llguidance's Lark. Raises ValueError; the matcher finds most faults later."""
    return f"{LARK_HEAD}\n{_WRITERS[kind](text)}"


def _json_lark(text: str) -> str:
    try:
        schema = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from error
    return f"start: %json {msgspec.json.encode(schema).decode()}"


def _regex_lark(text: str) -> str:
    grammar: str = msgspec.json.decode(llguidance.grammar_from("regex", text))["grammars"][0]["lark_grammar"]
    return grammar


def _tag_lark(text: str) -> str:
    try:
        tag = msgspec.json.decode(text, type=_StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"structures and triggers are needed: {error}") from error
    return llguidance.StructTag.to_grammar([_with_trigger(each, tag.triggers) for each in tag.structures])


_WRITERS: dict[ConstraintKind, Callable[[str], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_lark,
    ConstraintKind.REGEX: _regex_lark,
    ConstraintKind.EBNF: partial(llguidance.grammar_from, "ebnf"),
    ConstraintKind.STRUCTURAL_TAG: _tag_lark,
}


def _with_trigger(structure: _Structure, triggers: list[str]) -> llguidance.StructTag:
    trigger = next((each for each in triggers if structure.begin.startswith(each)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {structure.begin!r}")
    return llguidance.StructTag(trigger=trigger, begin=structure.begin, grammar=structure.schema, end=structure.end)


def _shown(reason: str) -> str:
    """Return llguidance's reason without positions in the rewritten grammar, which the caller has never seen."""
    reason = _OWN_PLACE.sub("", reason).strip()
    return reason if len(reason) <= _SHOWN_CHARACTERS else f"{reason[:_SHOWN_CHARACTERS]} …"
