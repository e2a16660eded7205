"""Helpers that send a request to an engine and collect its answer."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, cast

from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import SamplingParameters
from proxy.engines.protocol import Engine, EngineChunk, EngineFinish, GenerateRequest, LabelSpan
from tests.engines.tiny_model import make_tokenizer

PROMPT = tuple(make_tokenizer().encode("What is 12 plus 30?"))
END_ID = 256
NEVER_END = {str(END_ID): -100.0}
_numbers = itertools.count()


class Answer(NamedTuple):
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: EngineFinish | None
    spans: tuple[LabelSpan, ...]
    chunks: int
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()


def ask(prompt: tuple[int, ...] = PROMPT, *, stream: bool = False, **sampling: Any) -> GenerateRequest:
    """Return a request without a natural end, greedy by default."""
    options = {"max_new_tokens": 16, "temperature": 0.0, "logit_bias": NEVER_END, **sampling}
    return GenerateRequest(
        request_id=f"request-{next(_numbers)}",
        input_ids=TokenIds.of(prompt),
        sampling=SamplingParameters(**options),
        stream=stream,
    )


def open_stream(engine: Engine, request: GenerateRequest) -> AsyncGenerator[EngineChunk]:
    return cast("AsyncGenerator[EngineChunk]", engine.generate(request))


async def collect(engine: Engine, request: GenerateRequest) -> Answer:
    return gather([chunk async for chunk in engine.generate(request)])


def gather(chunks: list[EngineChunk]) -> Answer:
    assert all(chunk.finish is None and not chunk.spans for chunk in chunks[:-1])
    return Answer(
        ids=tuple(token for chunk in chunks for token in chunk.output_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish=chunks[-1].finish,
        spans=chunks[-1].spans,
        chunks=len(chunks),
        tops=tuple(top for chunk in chunks for top in chunk.top_logprobs),
    )
