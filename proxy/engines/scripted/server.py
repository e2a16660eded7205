"""The HTTP front: SGLang's native endpoints over a script."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from proxy.engines.common import replies
from proxy.engines.common.grammar_compiler import GrammarRefused
from proxy.engines.common.http import ControlEndpoints, send_event, send_json, start_stream, until_disconnected
from proxy.engines.common.wire import AdapterLoad, BodyReader, GenerateBody, RequestRefused
from proxy.engines.scripted.adapters import NamedAdapters, scores
from proxy.engines.scripted.answers import AnswerWriter
from proxy.engines.scripted.constraints import ConstraintCheck
from proxy.engines.scripted.generation import Generation, Plan, SharedState, cut
from proxy.engines.scripted.matching import NoRule, PromptReader, Rules
from proxy.engines.scripted.script import Script
from proxy.tokens.template import ChatTemplate

_LOG = logging.getLogger("base_rl.scripted")

LOGPROB = -1.0
"""Stand-in for the log-probability of every token, as there is no distribution. It is not 0, which elsewhere stands
for a missing value. With `top_logprobs_num` the answer's token comes first, and others follow with -2, -3, and so
on."""


class ScriptedEngine:
    """The application, and the control endpoints' engine (`common.http.ControlledEngine`). `/generate` is bare ASGI,
    because benchmarks measure the proxy by it; the other endpoints are Starlette's.

    Raises ConfigurationError for a template that cannot render the script's answers.
    """

    def __init__(
        self,
        template: ChatTemplate,
        script: Script,
        *,
        model: str,
        weight_label: str,
        ignore_adapters: bool = False,
    ) -> None:
        self._model = model
        self._state = SharedState(weight_label)
        self._adapters = NamedAdapters(ignored=ignore_adapters)
        self._rules = Rules(script, PromptReader(template))
        self._writer = AnswerWriter(template)
        for number, rule in enumerate(script.rule, 1):
            self._writer.check(number, rule)
        self._constraints = _constraint_check(template)
        self._defaults = script.defaults
        self._bodies = BodyReader(GenerateBody, vocabulary=template.vocabulary_size, context=template.context_length)
        self._vocabulary = template.vocabulary_size
        self._context = template.context_length
        self._stop_ids = frozenset(template.stop_ids)
        self._decode = template.tokenizer.decode
        self._controls = Starlette(routes=ControlEndpoints(self).routes())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(receive, send)
        else:
            await self._controls(scope, receive, send)

    async def load_directory(self, path: str, label: str | None) -> None:
        """Take the label. There is nothing to load, but the directory must hold a model or an adapter."""
        if not any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise RequestRefused(f"{path} is no model and no adapter: there is no config.json")
        self._model = path
        if label is not None:
            self._state.label = label

    async def load_adapter(self, body: AdapterLoad) -> None:
        self._adapters.load(body)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def adapters(self) -> Mapping[str, str]:
        return self._adapters.paths

    async def rename_weights(self, label: str, *, abort_all: bool) -> None:
        if abort_all:
            self._state.abort(None)
        self._state.label = label

    async def pause(self, mode: str) -> None:
        self._state.pause(mode)

    async def resume(self) -> None:
        self._state.resume()

    async def abort(self, rid: str | None) -> None:
        self._state.abort(rid)

    async def flush_cache(self) -> bool:
        return not self._state.live

    async def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._model,
            "is_generation": True,
            "weight_version": self._state.label,
            "model_type": "scripted",
            "architectures": [],
        }

    async def server_info(self) -> dict[str, Any]:
        return {
            "model_path": self._model,
            "weight_version": self._state.label,
            "context_length": self._context,
            "grammar_backend": "none" if self._constraints is None else "llguidance",
            "enable_deterministic_inference": True,
            "adapters_from_disk": True,
            "whole_prompts": True,
            "enable_lora": True,
            "running": len(self._state.live),
            "answers_by_rule": self._rules.used,
        }

    async def is_healthy(self) -> bool:
        return True

    async def _generate(self, receive: Receive, send: Send) -> None:
        message = await receive()
        content: bytes = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            content += message.get("body", b"")
        try:
            body, generation = await self._begin(content)
        except (RequestRefused, GrammarRefused, NoRule) as error:
            await send_json(send, 400, {"error": {"message": str(error)}})
            return
        gone = None
        # An answer without any wait is sent before the client could leave, so it needs no task that listens.
        if body.stream or generation.waits:
            gone = asyncio.create_task(_abort_when_gone(receive, generation))
        self._state.live.add(generation)
        try:
            await (self._stream(body, generation, send) if body.stream else self._answer(body, generation, send))
        finally:
            self._state.live.discard(generation)
            if gone is not None:
                gone.cancel()

    async def _begin(self, content: bytes) -> tuple[GenerateBody, Generation]:
        body, limit = self._bodies.read(content)
        adapter = self._adapters.require(body.lora_path)
        chosen = self._rules.choose(body.input_ids)
        rule = chosen.rule
        ids, finish = cut(
            self._writer.ids(chosen),
            body.sampling,
            limit=limit,
            stop_ids=self._stop_ids,
            repeated=rule.finish == "length",
            decode=self._decoded,
        )
        constraint = body.sampling.constraint
        if constraint is not None:
            if self._constraints is None:
                raise RequestRefused("constraints need a tokenizer that llguidance can read, and the model has none.")
            whole = finish["type"] == "stop" and finish["matched"] in self._stop_ids
            checked = ids[:-1] if whole else ids
            await self._constraints.check(constraint, checked, number=chosen.number, whole=whole)
        if rule.error is not None:
            ids = ids[: rule.error.after_tokens]
        delay = self._defaults.delay_ms if rule.delay_ms is None else rule.delay_ms
        interval = self._defaults.ms_per_token if rule.ms_per_token is None else rule.ms_per_token
        plan = Plan(ids=ids, finish=finish, delay=delay / 1000, interval=interval / 1000, failure=rule.error)
        return body, Generation(body.rid or uuid.uuid4().hex, plan, self._state, adapter)

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text: str = self._decode(ids, skip_special_tokens=False)
        return text

    async def _answer(self, body: GenerateBody, generation: Generation, send: Send) -> None:
        async for _ in generation.steps(whole=True):
            pass
        failure = generation.plan.failure
        if failure is not None and generation.aborted is None:
            await send_json(send, failure.status, {"error": {"message": failure.message}})
        else:
            await send_json(send, 200, self._chunk(body, generation, 0, last=True))

    async def _stream(self, body: GenerateBody, generation: Generation, send: Send) -> None:
        """Send an event for every step, with its new tokens; the last event has the end, once that is known."""
        failure = generation.plan.failure
        if failure is not None and failure.after_tokens == 0:
            await self._answer(body, generation, send)
            return
        await start_stream(send)
        total, sent = len(generation.plan.ids), 0
        async for _ in generation.steps(whole=False):
            if generation.produced < total or failure is not None:
                await send_event(send, self._chunk(body, generation, sent, last=False))
                sent = generation.produced
        last: dict[str, Any] = self._chunk(body, generation, sent, last=True)
        if failure is not None and generation.aborted is None:
            last = {"error": {"message": failure.message, "code": failure.status}}
        await send_event(send, last, last=True)

    def _chunk(self, body: GenerateBody, generation: Generation, start: int, *, last: bool) -> dict[str, Any]:
        """Return the tokens from `start` to the newest one as the wire has them."""
        ids = generation.plan.ids[start : generation.produced]
        logprobs: list[replies.ScoredToken] | None = None
        tops: list[list[replies.ScoredToken]] | None = None
        if body.return_logprob:
            logprobs = [(LOGPROB, token, None) for token in ids]
            if body.top_logprobs_num:
                tops = [self._ranked(token, body.top_logprobs_num) for token in ids]
        content = replies.chunk(
            rid=generation.rid,
            prompt_tokens=len(body.input_ids),
            completion_tokens=generation.produced,
            weight_version=generation.label,
            output_ids=ids,
            logprobs=logprobs,
            tops=tops,
            input_logprobs=self._input_logprobs(body, generation) if start == 0 else None,
        )
        if not self._adapters.ignored:
            content["meta_info"]["adapter"] = generation.adapter
        if not last:
            return content
        return replies.last_chunk(
            content, finish=generation.finish, spans=generation.spans, retractions=generation.retractions
        )

    def _input_logprobs(self, body: GenerateBody, generation: Generation) -> list[replies.ScoredToken] | None:
        start = body.logprob_start_len
        if not body.return_logprob or start < 0:
            return None
        weights = self._model if generation.adapter is None else self._adapters.paths.get(generation.adapter, "")
        found = [None, *scores(body.input_ids, weights)]
        return [
            (logprob if at > start else None, token, None)
            for at, (logprob, token) in enumerate(zip(found, body.input_ids, strict=True))
        ][start:]

    def _ranked(self, token: int, count: int) -> list[replies.ScoredToken]:
        others = ((token + rank) % self._vocabulary for rank in range(min(count, self._vocabulary)))
        return [(LOGPROB - rank, other, None) for rank, other in enumerate(others)]


async def _abort_when_gone(receive: Receive, generation: Generation) -> None:
    await until_disconnected(receive)
    generation.abort("The client has gone")


def _constraint_check(template: ChatTemplate) -> ConstraintCheck | None:
    try:
        return ConstraintCheck(template)
    except ValueError as error:
        _LOG.warning("constraints are refused: llguidance cannot read the tokenizer: %s", error)
        return None
