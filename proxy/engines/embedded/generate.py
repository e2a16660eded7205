"""The endpoint `/generate`: from a request's body to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from proxy.engines.common import replies
from proxy.engines.common.grammar_compiler import GrammarRefused
from proxy.engines.common.http import refusal, send_event, send_json, start_stream, until_disconnected
from proxy.engines.common.wire import BodyReader, RequestRefused
from proxy.engines.embedded.generation import Generation
from proxy.engines.embedded.lora import Adapter
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.residency import AdapterRegistry
from proxy.engines.embedded.scheduler import Scheduler
from proxy.engines.embedded.stopping import StopStrings
from proxy.engines.embedded.wire import EmbeddedBody, rules_of


class _Exchange(msgspec.Struct, kw_only=True):
    """One request on its way. `ready` is set when its generation has something new, and when its client has gone;
    `input_logprobs` is None unless the request asked for them."""

    body: EmbeddedBody
    generation: Generation
    ready: asyncio.Event
    gone: asyncio.Task[None]
    send: Send
    input_logprobs: list[replies.ScoredToken] | None

    async def wait(self) -> bool:
        """Wait for something new; return False if the client has gone."""
        await self.ready.wait()
        self.ready.clear()
        return not self.gone.done()


class GenerateEndpoint:
    """`/generate` as bare ASGI, because it must notice that the client has gone while it waits for tokens.

    `scheduler` returns the running scheduler, which exists only once the application has started.
    """

    def __init__(self, model: ServedModel, scheduler: Callable[[], Scheduler], adapters: AdapterRegistry) -> None:
        self._model = model
        self._adapters = adapters
        self._scheduler = scheduler
        self._bodies = BodyReader(EmbeddedBody, vocabulary=model.vocabulary, context=model.context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            await self._respond(scope, receive, send, held)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, held: AsyncExitStack) -> None:
        """Answer one request; `held` ends its use of the adapter."""
        content = await Request(scope, receive).body()
        ready = asyncio.Event()
        try:
            body, limit = self._bodies.read(content)
            generation = await self._generation(body, limit, ready.set)
            generation.adapter = await held.enter_async_context(self._adapters.using(body.lora_path))
        except (RequestRefused, GrammarRefused) as error:
            await refusal(str(error))(scope, receive, send)
            return
        scheduler = self._scheduler()
        input_logprobs = await self._input_logprobs(body, generation.adapter)
        scheduler.add(generation)
        gone = asyncio.create_task(until_disconnected(receive))
        gone.add_done_callback(lambda _: ready.set())
        exchange = _Exchange(
            body=body, generation=generation, ready=ready, gone=gone, send=send, input_logprobs=input_logprobs
        )
        try:
            await (self._stream(exchange) if body.stream else self._answer(exchange))
        finally:
            gone.cancel()
            if generation.finish is None:
                scheduler.submit(partial(scheduler.drop, generation))

    async def _generation(self, body: EmbeddedBody, limit: int, notify: Callable[[], None]) -> Generation:
        model = self._model
        rules = rules_of(body, limit=limit)
        grammar = None
        if rules.constraint is not None:
            if model.grammars is None:
                raise RequestRefused("constraints need a fast tokenizer and an end token, and the model lacks one.")
            grammar = await model.grammars.compile(rules.constraint, rules.stop_token_ids)
        stop_strings = None
        if rules.stop:
            if model.decode is None:
                raise RequestRefused("stop strings need a tokenizer, and the model's directory has none.")
            stop_strings = StopStrings(rules.stop, model.decode)
        return Generation(
            rid=body.rid or uuid.uuid4().hex,
            prompt=body.input_ids,
            rules=rules,
            # Behind a complete answer the grammar allows only end tokens, so they end it even under `ignore_eos`.
            stop_ids=frozenset() if rules.ignore_eos and grammar is None else model.eos_ids | rules.stop_token_ids,
            stop_strings=stop_strings,
            grammar=grammar,
            stream=body.stream,
            notify=notify,
        )

    async def _input_logprobs(self, body: EmbeddedBody, adapter: Adapter | None) -> list[replies.ScoredToken] | None:
        """Return the log-probabilities of the input from `logprob_start_len` on; None if the request does not ask for
        them. The first token has none, as in SGLang."""
        start = body.logprob_start_len
        if not body.return_logprob or start < 0:
            return None
        score = partial(self._model.score, body.input_ids, start + 1, adapter)
        found = []
        if start + 1 < len(body.input_ids):
            found = await asyncio.wrap_future(self._scheduler().submit(score))
        return [(each, token, None) for each, token in zip([None, *found], body.input_ids[start:], strict=True)]

    async def _answer(self, exchange: _Exchange) -> None:
        generation = exchange.generation
        while generation.finish is None:
            if not await exchange.wait():
                return
        if generation.failure is not None:
            await send_json(exchange.send, 500, {"error": {"message": generation.failure}})
            return
        await send_json(exchange.send, 200, self._chunk(exchange, 0, len(generation.logprobs), last=True))

    async def _stream(self, exchange: _Exchange) -> None:
        """Send an event at every wake-up, with the tokens since the event before."""
        generation = exchange.generation
        await start_stream(exchange.send)
        sent, last = 0, False
        while not last:
            if not await exchange.wait():
                return
            # In this order: the model thread sets `finish` last, so a finished generation has all its tokens.
            last = generation.finish is not None
            ready = len(generation.logprobs)
            if ready == sent and not last:
                continue
            content = self._chunk(exchange, sent, ready, last=last)
            if generation.failure is not None:
                content = {"error": {"message": generation.failure, "code": 500}}
            sent = ready
            await send_event(exchange.send, content, last=last)

    def _chunk(self, exchange: _Exchange, start: int, end: int, *, last: bool) -> dict[str, Any]:
        """Return the output tokens `[start, end)` as the wire has them."""
        body, generation = exchange.body, exchange.generation
        ids = generation.output[start:end]
        logprobs: list[replies.ScoredToken] | None = None
        tops: list[list[replies.ScoredToken]] | None = None
        if body.return_logprob:
            logprobs = [(each, token, None) for each, token in zip(generation.logprobs[start:end], ids, strict=True)]
            if generation.rules.top_logprobs:
                tops = [[(each, token, None) for each, token in top] for top in generation.tops[start:end]]
        content = replies.chunk(
            rid=generation.rid,
            prompt_tokens=len(generation.prompt),
            completion_tokens=end,
            weight_version=generation.final_label if last else generation.label(self._scheduler().weight_label),
            output_ids=ids,
            logprobs=logprobs,
            tops=tops,
            input_logprobs=exchange.input_logprobs if start == 0 else None,
        )
        # Not in SGLang's answers: the name of the adapter that the tokens are of.
        content["meta_info"]["adapter"] = None if generation.adapter is None else generation.adapter.name
        if not last:
            return content
        assert generation.finish is not None
        return replies.last_chunk(
            content, finish=generation.finish, spans=generation.spans, retractions=generation.retractions
        )
