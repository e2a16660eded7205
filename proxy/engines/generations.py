"""The client's side of `/generate`: one request and its stream, sent again if the weights change before its first
token."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus

from proxy.bounded_cache import BoundedCache
from proxy.engines.connections import Connections, Reply
from proxy.engines.prompts import ATTEMPTS, PromptGate, PromptRecalled, WaitingPrompt
from proxy.engines.protocol import EngineChunk, EngineFinish, GenerateRequest
from proxy.engines.replies import ReplyParser, joined, message_of, refusal_of
from proxy.engines.requests import bounds_of, engine_request_id, generate_body
from proxy.engines.streams import EventLines, TokenProgress
from proxy.errors import BaseRlError, EngineUnavailable, InvalidRequest

# Past labels whose prefix keys are not used again; the prefixes of older labels have left every cache.
_PAST_LABELS = 1024
# Longest wait of a pause for requests that earlier pauses have called back several times.
_SETTLE_SECONDS = 30.0
# Longest wait for running aborts when the client closes.
_ABORT_SECONDS = 5.0


class PrefixKeys:
    """The key of each request: SGLang shares prefixes only between requests with the same key.

    SGLang's prefix cache survives a weight update that lets requests continue. The key is therefore the label of the
    weights, with a random part if the label was served before.
    """

    def __init__(self) -> None:
        self.label: str | None = None
        """The label that the engine reported last; None before its first report."""
        self.key: str | None = None
        self._past_labels: BoundedCache[str, bool] = BoundedCache(_PAST_LABELS)

    def served(self, label: str) -> None:
        """Take the label that the engine reports."""
        if label == self.label:
            return
        # Until this proxy reads a new label, its calls carry the key of the previous one: if the engine has restarted
        # with its base model, or another proxy has loaded weights, they computed prefixes with other weights under
        # that key. Loading the previous version again does not flush them, so its label gets a new key.
        # The first label may have been served before as well: to this proxy's predecessor.
        is_known = self.label is not None and label not in self._past_labels
        self.key = label if is_known else f"{label}-{uuid.uuid4().hex}"
        self._past_labels.put(label, True)
        self.label = label


class GenerationClient:
    """Sends generations over `calls`. `shares_prefixes`: the engine computes prompts from cached prefixes or in
    several parts, so that a prompt may be older than its first token; False until the engine has said so."""

    def __init__(
        self,
        calls: Connections,
        keys: PrefixKeys,
        *,
        stall_seconds: float,
        send_abort: Callable[[str], Awaitable[None]],
        read_label: Callable[[], Awaitable[object]],
        read_grammar_backend: Callable[[], Awaitable[str]],
    ) -> None:
        """`send_abort` takes the id of a request in the engine. `read_label` asks the engine for its label,
        `read_grammar_backend` for its back end unless it is known."""
        self.shares_prefixes = False
        self.is_paused = False
        self._calls = calls
        self._keys = keys
        self._stall_seconds = stall_seconds
        self._send_abort = send_abort
        self._read_label = read_label
        self._read_grammar_backend = read_grammar_backend
        self._gate = PromptGate()
        self._sent_again: dict[str, str] = {}
        """Ids in the engine of the requests that were sent again."""
        self._aborts: set[asyncio.Task[None]] = set()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineChunk]:
        """Stream chunks, see `SglangEngine.generate`."""
        # The name of an adapter never stands for two sets of weights.
        is_simple = not self.shares_prefixes or request.adapter is not None
        return self._exchange(request, None) if is_simple else self._exchange_until_answered(request)

    async def _exchange_until_answered(self, request: GenerateRequest) -> AsyncGenerator[EngineChunk]:
        prompt = self._gate.enter(request.request_id)
        try:
            for _ in range(ATTEMPTS):
                await self._gate.passed()
                if prompt.is_aborted:
                    yield EngineChunk(output_ids=(), logprobs=(), finish=EngineFinish.ABORT)
                    return
                try:
                    async with aclosing(self._exchange(request, prompt)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                    return
                except PromptRecalled:
                    await self._prepare_again(request.request_id, prompt)
        finally:
            self._gate.leave(request.request_id)
            self._sent_again.pop(request.request_id, None)
        raise EngineUnavailable(f"the engine's weights changed {ATTEMPTS} times before the answer's first token")

    async def abort(self, request_id: str) -> None:
        """End a generation; one that waits to be sent again is not sent."""
        self._gate.abort(request_id)
        await self._send_abort(self._sent_again.get(request_id) or engine_request_id(request_id))

    async def prepare_pause(self) -> None:
        """Hold back new requests, after a bounded wait for those that were called back often."""
        if self.shares_prefixes:
            await self._gate.settled(_SETTLE_SECONDS)
            self._gate.close()

    def paused(self) -> None:
        """Call back the requests without a token, once the engine computes nothing more."""
        if self.shares_prefixes:
            self._gate.recall()

    def resumed(self) -> None:
        """Send requests again."""
        self._gate.open()

    async def aclose(self) -> None:
        """Wait for running aborts."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_SECONDS)

    async def _prepare_again(self, request_id: str, prompt: WaitingPrompt) -> None:
        self._abort_in_background(prompt.engine_id)
        prompt.send_again()
        self._sent_again[request_id] = prompt.engine_id
        if prompt.label == self._keys.label:
            await self._read_label()  # another proxy may have loaded weights that this one does not know of yet

    async def _exchange(self, request: GenerateRequest, prompt: WaitingPrompt | None) -> AsyncGenerator[EngineChunk]:
        """Send a request once. Raises PromptRecalled before its first chunk; never if `prompt` is None."""
        needs_backend = request.sampling.constraint is not None
        grammar_backend = await self._read_grammar_backend() if needs_backend else None
        engine_id = engine_request_id(request.request_id) if prompt is None else prompt.engine_id
        parser = ReplyParser(bounds_of(request), request.adapter)
        over = False
        try:
            body = await generate_body(
                request,
                engine_id=engine_id,
                grammar_backend=grammar_backend,
                prefix_key=lambda: self._key_of(prompt),
                reports_first_token=prompt is not None,
            )
            sent = self._calls.request("POST", "/generate", body)
            with await (sent if prompt is None else prompt.until_recalled(sent)) as reply:
                if reply.status != HTTPStatus.OK:
                    raise refusal_of(reply.status, message_of(await reply.read()))
                async with aclosing(self._read(request, parser, reply, prompt)) as chunks:
                    async for chunk in chunks:
                        # Set before the yield: a reader that stops at the last chunk leaves nothing to abort.
                        over = parser.finished
                        yield chunk
            if not parser.finished:
                raise EngineUnavailable("the engine closed the stream before the answer was whole")
        except (EngineUnavailable, InvalidRequest, PromptRecalled):
            over = True
            raise
        finally:
            if not over:
                self._abort_in_background(engine_id)

    async def _read(
        self, request: GenerateRequest, parser: ReplyParser, reply: Reply, prompt: WaitingPrompt | None
    ) -> AsyncGenerator[EngineChunk]:
        max_bytes = bounds_of(request).max_bytes
        if prompt is None and not request.stream:
            yield parser.parse(await reply.read(max_bytes))
            return
        events = EventLines(max_bytes)
        progress = TokenProgress(reply, self._stall_seconds)
        withheld: list[EngineChunk] = []
        while not events.over and (part := await self._part(reply, prompt)):
            for chunk in parser.parse_all(events.feed(part)):
                self._check_first(request.request_id, parser, prompt)
                if request.stream:
                    progress.tokens_came()
                    yield chunk
                else:
                    # Withheld to the end: an answer that nobody has seen yet can be generated by another engine.
                    withheld.append(chunk)
            if request.stream and not self.is_paused:
                progress.check()
        reply.runs_out = events.over
        if parser.finished and withheld:
            yield joined(withheld)

    async def _part(self, reply: Reply, prompt: WaitingPrompt | None) -> bytes:
        return await reply.part() if prompt is None else await prompt.until_recalled(reply.part())

    def _key_of(self, prompt: WaitingPrompt | None) -> str | None:
        if prompt is not None:
            prompt.label = self._keys.label
        return self._keys.key

    def _check_first(self, request_id: str, parser: ReplyParser, prompt: WaitingPrompt | None) -> None:
        """Raise PromptRecalled if the first token comes from other weights than the request's key names."""
        if prompt is None or prompt.is_answered or parser.first_label is None:
            return
        if parser.first_label != prompt.label:
            raise PromptRecalled
        prompt.is_answered = True
        self._gate.leave(request_id)

    def _abort_in_background(self, engine_id: str) -> None:
        # A task of its own, since the task that closes the iterator may itself be cancelled. The set keeps a
        # reference to it: asyncio may drop a task that nobody refers to.
        task = asyncio.create_task(self._abort_quietly(engine_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, engine_id: str) -> None:
        # A lost abort costs the engine the rest of one answer, and nobody waits for it any more.
        with contextlib.suppress(BaseRlError):
            await self._send_abort(engine_id)
