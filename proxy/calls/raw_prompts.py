"""Plan prompts without messages: the token ids of the recorded completion that each extends, and the new ones."""

from __future__ import annotations

from functools import partial

import msgspec

from proxy.calls.bounds import LARGE_TEXT
from proxy.calls.call import Answer, ModelCall
from proxy.calls.prompts import RECENT_TURNS, PlannedPrompt, known_turn, off_the_owner
from proxy.contract.identifiers import RunId, TurnId
from proxy.errors import ContextLengthExceeded
from proxy.http.workers import Workers
from proxy.sessions.identification import SessionContext
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.raw import (
    NO_TOOLS,
    CompletionIndex,
    RawPrompt,
    SaidAnswer,
    length_of,
    plan_ids,
    plan_text,
    plan_text_behind,
)
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import ParentTurn, TrajectoryStore

# Completions of a run that are read from the store after a restart.
_RECALLED = 4096


class ReadPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one call, each with the digests of the completions that it extends, the longest first."""

    prompts: tuple[RawPrompt, ...]
    extended: tuple[tuple[bytes, ...], ...]

    @property
    def named(self) -> tuple[TurnId, ...]:
        """The turns whose ids the call sends back: none, as a raw prompt holds no ids."""
        return ()

    @property
    def answered(self) -> tuple[bytes, ...]:
        """The digests that identify the session: those of the first prompt that extends a completion."""
        return next(filter(None, self.extended), ())


class RawPromptPlanner:
    """Plans prompts of text and of token ids."""

    def __init__(
        self,
        template: ChatTemplate,
        decoder: TokenDecoder,
        trajectories: TrajectoryStore,
        completions: CompletionIndex,
        workers: Workers,
    ) -> None:
        self._template = template
        self._workers = workers
        self._decoder = decoder
        self._trajectories = trajectories
        self._completions = completions
        self._recalled: set[RunId] = set()

    async def recall(self, run_id: RunId) -> None:
        """Read the run's completions from before this process started, once. Call it before `read`."""
        if run_id not in self._recalled:
            for digest in reversed(await self._trajectories.endings(run_id, NO_TOOLS, _RECALLED)):
                self._completions.recall(digest)
            self._recalled.add(run_id)

    def read(self, call: ModelCall) -> ReadPrompts:
        """Return the call's prompts. Threads may call it.

        Raise InvalidRequest for ids that no vocabulary has, ContextLengthExceeded for more ids than the context
        holds.
        """
        longest = max((len(prompt) for prompt in call.prompts if not isinstance(prompt, str)), default=0)
        if longest > self._template.context_length:
            raise ContextLengthExceeded(
                f"prompt is too long: {longest} tokens > {self._template.context_length} maximum", param="prompt"
            )
        prompts = tuple(map(RawPrompt, call.prompts))
        return ReadPrompts(prompts=prompts, extended=tuple(map(self._completions.extended_by, prompts)))

    async def plan(self, call: ModelCall, asked: ReadPrompts, session: SessionContext) -> tuple[PlannedPrompt, ...]:
        """Find the completion that each prompt extends, and tokenise the rest.

        Raise InvalidRequest for an empty prompt and for ids of no token, ContextLengthExceeded for too long a prompt.
        """
        recent = [] if session.is_new else await self._trajectories.recent_turns(session.id, RECENT_TURNS)
        planned = []
        for prompt, extended in zip(asked.prompts, asked.extended, strict=True):
            parent = None if session.is_new else await self._parent(prompt, extended, session, recent)
            said = await self._said(parent) if parent is not None and prompt.is_text else None
            make = partial(self._planned, prompt, parent, said, recent)
            is_large = call.is_large or len(prompt.data) > LARGE_TEXT
            planned.append(await self._workers.run(make) if is_large else make())
        return tuple(planned)

    async def _parent(
        self, prompt: RawPrompt, extended: tuple[bytes, ...], session: SessionContext, recent: list[ParentTurn]
    ) -> ParentTurn | None:
        """Find the turn of the session with the longest completion that `prompt` extends.

        The session's latest turns are searched too, for completions that this process has forgotten or never knew.
        """
        # By index first; the session's latest turns are compared only if it fails.
        found = await self._trajectories.find_parent(session.id, extended)
        if found is not None:
            return found
        fitting = [turn for turn in recent if prompt.extends(turn.conversation_hash)]
        return max(fitting, key=lambda turn: length_of(turn.conversation_hash), default=None)

    async def _said(self, parent: ParentTurn) -> SaidAnswer | None:
        answers = await self._trajectories.responses([parent.id])
        if not answers:
            return None
        choice = msgspec.convert(answers[0], Answer).choices[0]
        return SaidAnswer(text=choice.text, tokens=choice.completion_tokens)

    def _planned(
        self, prompt: RawPrompt, parent: ParentTurn | None, said: SaidAnswer | None, recent: list[ParentTurn]
    ) -> PlannedPrompt:
        turns = [parent, *recent] if parent is not None else recent
        known = list(map(known_turn, turns))
        if not isinstance(prompt.given, str):
            plan = off_the_owner(plan_ids(self._template, prompt.given, known), turns)
            text = self._decoder.text(plan.new_ids)
        elif parent is not None and said is not None:
            text = prompt.data[length_of(parent.conversation_hash) :].decode()
            plan = plan_text_behind(self._template, self._decoder, known[0], said, text)
        else:
            text = prompt.given
            plan = off_the_owner(plan_text(self._template, text, known), turns)
        return PlannedPrompt(
            plan=plan,
            messages=[{"role": "user", "content": text}],
            request_hash=prompt.digest,
            tools_hash=NO_TOOLS,
            raw=prompt,
        )
