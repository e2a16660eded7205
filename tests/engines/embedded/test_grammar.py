"""Grammars in the parts of the embedded engine: masks, bounds, and grammars that grow too large."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import llguidance
import pytest
import torch

from proxy.contract.turn import Constraint, ConstraintKind
from proxy.engines.common import grammar_compiler
from proxy.engines.common.grammar_compiler import GrammarCompiler, GrammarRefused
from proxy.engines.embedded.grammar import allowed_next
from proxy.engines.embedded.sampling import BatchRules, sample
from tests.engines.conftest import Models
from tests.engines.embedded.test_sampling import CPU, generator, rules
from tests.engines.embedded.test_scheduler import generation, running
from tests.engines.tiny_model import VOCABULARY, make_tokenizer

TOKENIZER = make_tokenizer()
END = TOKENIZER.get_vocab()["<|im_end|>"]
OTHER_END = TOKENIZER.get_vocab()["<|endoftext|>"]


def regex(text: str) -> Constraint:
    return Constraint(kind=ConstraintKind.REGEX, text=text)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.backend_tokenizer.to_str(), vocabulary=VOCABULARY, eos_ids=[END])


def ids(text: str) -> set[int]:
    return set(TOKENIZER.encode(text))


async def test_masks_are_of_the_tokens_that_may_come_next() -> None:
    states = [await compiler().compile(regex(text), [OTHER_END, 10**6]) for text in ("[ab]c", "c?", "d")]
    allowed = [set(row.nonzero()[:, 0].tolist()) for row in allowed_next(states, VOCABULARY)]
    assert allowed == [ids("ab"), ids("c") | {END, OTHER_END}, ids("d")]
    states[0].accept(ids("a").pop())
    states[2].accept(ids("d").pop())
    allowed = [set(row.nonzero()[:, 0].tolist()) for row in allowed_next(states, VOCABULARY)]
    assert allowed == [ids("c"), ids("c") | {END, OTHER_END}, {END, OTHER_END}]


async def test_requests_with_one_grammar_do_not_share_how_far_they_are() -> None:
    grammars = compiler()
    first, second = await grammars.compile(regex("ab"), []), await grammars.compile(regex("ab"), [])
    first.accept(ids("a").pop())
    allowed = allowed_next([first, second], VOCABULARY)
    assert [set(row.nonzero()[:, 0].tolist()) for row in allowed] == [ids("b"), ids("a")]


async def test_values_beyond_bounds_are_refused() -> None:
    grammars = compiler()
    too_long = Constraint(kind=ConstraintKind.JSON_SCHEMA, text="{}" + " " * grammar_compiler.MOST_CHARACTERS)
    rules_in_a_row = "\n".join(f'r{number}: "a"' for number in range(grammar_compiler.MOST_LINES + 1))
    for constraint in (too_long, Constraint(kind=ConstraintKind.EBNF, text=f"start: r0\n{rules_in_a_row}")):
        with pytest.raises(GrammarRefused, match="than"):
            await grammars.compile(constraint, [])


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler's thread cannot be ended, so another thread compiles the next grammar."""
    # A private method, because no grammar is slow enough on every machine and within the bounds on its size.
    grammars, compile_now, ending = compiler(), GrammarCompiler._compile, threading.Event()

    def slow(self: GrammarCompiler, constraint: Constraint) -> llguidance.LLMatcher:
        if constraint.text == "slow":
            ending.wait(60)
        return compile_now(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    with monkeypatch.context() as brief:
        brief.setattr(grammar_compiler, "COMPILE_SECONDS", 0.05)
        with pytest.raises(GrammarRefused, match="not compiled within"):
            await grammars.compile(regex("slow"), [])
    await grammars.compile(regex("quick"), [])
    ending.set()


async def test_a_grammar_that_becomes_too_large_ends_its_request_alone(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = llguidance.LLParserLimits(verbose_errors=False, step_lexer_fuel=400)
    monkeypatch.setattr(grammar_compiler, "LIMITS", tight)
    grammars = compiler()
    state = await grammars.compile(regex("[a-d]{3}((?s:.*)x){3}[^é]{20}"), [])
    async with running(models) as scheduler:
        done = [asyncio.Event(), asyncio.Event()]
        held, free = generation([1, 2, 3], 40, done[0].set), generation([1, 2, 3], 12, done[1].set)
        held.grammar, held.rules = state, rules(constraint=regex(""), max_new_tokens=40, logit_bias=())
        scheduler.add(held)
        scheduler.add(free)
        await asyncio.gather(*(each.wait() for each in done))
    assert held.finish is not None
    assert held.finish["type"] == "abort"
    assert held.finish["status_code"] == 400
    assert "the constraint" in held.finish["message"]
    assert free.finish == {"type": "length", "length": 12}


def test_only_allowed_tokens_are_sampled_and_scored() -> None:
    logits = torch.randn(400, 40, generator=generator())
    some: Any = rules(constraint=regex("a"), top_logprobs=4)
    batch = BatchRules([some if row % 2 else rules(top_logprobs=2) for row in range(400)], CPU)
    allowed = torch.zeros(200, 40, dtype=torch.bool)
    allowed[:, [3, 17, 30]] = True
    draw = sample(logits, batch, [[]] * 400, generator(), allowed)
    assert {int(token) for token in draw.tokens_b[1::2]} == {3, 17, 30}
    assert len({int(token) for token in draw.tokens_b[::2]}) > 20
    held, chosen = logits[1::2][:, [3, 17, 30]], draw.tokens_b[1::2, None]
    expected = logits[1::2].gather(1, chosen)[:, 0] - held.logsumexp(-1)
    assert draw.logprobs_b[1::2] == pytest.approx(expected.numpy(), abs=1e-5)
    assert all(len(draw.tops[row]) == (3 if row % 2 else 2) for row in range(400)), "impossible tokens are not told"
    assert {token for _, token in draw.tops[1]} == {3, 17, 30}
