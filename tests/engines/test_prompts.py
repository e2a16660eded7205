"""A prompt is computed whole by the version that its turn names, however often the weights change."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from proxy.contract.token_ids import TokenIds
from proxy.engines.protocol import GenerateRequest, PauseMode
from proxy.engines.sglang import SglangEngine
from tests.engines.conftest import Models, Reference, Server
from tests.engines.generating import PROMPT, Answer, ask, collect
from tests.engines.tiny_model import CONTEXT

CALLERS = 8
SWAPS = {"embedded": 4, "sglang": 8}
ANSWERS_PER_SWAP = 6
SHARED = (PROMPT * CONTEXT)[: CONTEXT - 48]
TOLERANCE = 1e-3


def question(caller: int, number: int) -> GenerateRequest:
    """Return a request that shares nearly all of its prompt with the others; every other one is streamed."""
    own = (*PROMPT[: caller % len(PROMPT)], *(48 + int(digit) for digit in str(number)))
    request = ask(max_new_tokens=4, temperature=1.0, stream=bool(caller % 2))
    return msgspec.structs.replace(request, input_ids=TokenIds.of((*SHARED, *own)))


async def answers_during_swaps(
    engine: SglangEngine, models: Models, mode: PauseMode, swaps: int
) -> list[tuple[GenerateRequest, Answer]]:
    """Return the answers of callers that ask without a break, while models b and a are loaded in turn."""
    answers: list[tuple[GenerateRequest, Answer]] = []
    answered = asyncio.Condition()
    is_over = False

    async def call(caller: int) -> None:
        number = 0
        while not is_over:
            request, number = question(caller, number), number + 1
            answer = await collect(engine, request)
            async with answered:
                answers.append((request, answer))
                answered.notify_all()

    async with asyncio.TaskGroup() as callers:
        for caller in range(CALLERS):
            callers.create_task(call(caller))
        for swap in range(swaps):
            due = len(answers) + ANSWERS_PER_SWAP
            async with answered:
                while len(answers) < due:
                    await answered.wait()
            await engine.pause(mode)
            await engine.load_weights(str(models.a if swap % 2 else models.b), f"{'ba'[swap % 2]}{swap}")
            await engine.resume()
        is_over = True
    return answers


def first_differences(
    answers: list[tuple[GenerateRequest, Answer]], references: dict[str, Reference]
) -> list[tuple[str, float]]:
    """Return the label of each answer's first token, with the difference to its computed log-probability."""
    found = []
    for request, answer in answers:
        label = answer.spans[0].label
        (expected,) = references[label[0]].of_output(tuple(request.input_ids), answer.ids[:1])
        found.append((label, abs(answer.logprobs[0] - expected)))
    return found


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_first_tokens_are_those_of_the_version_that_their_turns_name(
    engine: SglangEngine,
    models: Models,
    server: Server,
    reference: Reference,
    reference_b: Reference,
    mode: PauseMode,
) -> None:
    answers = await answers_during_swaps(engine, models, mode, SWAPS[server.kind])
    differences = first_differences(answers, {"a": reference, "b": reference_b})
    assert {label[0] for label, _ in differences} == {"a", "b"}
    assert [each for each in differences if each[1] > TOLERANCE] == []
    assert all(len(answer.ids) == 4 for _, answer in answers)
