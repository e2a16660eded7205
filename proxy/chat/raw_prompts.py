"""Prompts without messages, in token ids: those of the recorded completion that they extend, and what is new."""

from __future__ import annotations

import msgspec

from proxy.chat.call import Answer, ModelCall
from proxy.chat.prompts import RECENT_TURNS, PlannedPrompt, known_turn, off_its_owner
from proxy.sessions.identification import SessionContext
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.prefix import PromptPlan
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
from proxy.trajectories.service import ParentTurn, TrajectoryStore


class ReadPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one call, each with the digests of the completions that it extends, longest first."""

    prompts: tuple[RawPrompt, ...]
    extended: tuple[tuple[bytes, ...], ...]

    @property
    def answered(self) -> tuple[bytes, ...]:
        """What tells the session of the call: of the first prompt that extends anything."""
        return next(filter(None, self.extended), ())


class RawPromptPlanner:
    """Plans prompts of text and of ids."""

    def __init__(
        self,
        template: ChatTemplate,
        decoder: TokenDecoder,
        trajectories: TrajectoryStore,
        completions: CompletionIndex,
    ) -> None:
        self._template = template
        self._decoder = decoder
        self._trajectories = trajectories
        self._completions = completions

    def read(self, call: ModelCall) -> ReadPrompts:
        prompts = tuple(map(RawPrompt, call.prompts))
        return ReadPrompts(prompts=prompts, extended=tuple(map(self._completions.extended_by, prompts)))

    async def plan(self, asked: ReadPrompts, session: SessionContext) -> tuple[PlannedPrompt, ...]:
        """Raises InvalidRequest for an empty prompt, and for ids of no token."""
        recent = [] if session.is_new else await self._trajectories.recent_turns(session.id, RECENT_TURNS)
        planned = []
        for prompt, extended in zip(asked.prompts, asked.extended, strict=True):
            parent = None if session.is_new else await self._parent(prompt, extended, session, recent)
            plan, covered = await self._plan(prompt, parent, recent)
            planned.append(self._planned(prompt, plan, covered))
        return tuple(planned)

    async def _parent(
        self, prompt: RawPrompt, extended: tuple[bytes, ...], session: SessionContext, recent: list[ParentTurn]
    ) -> ParentTurn | None:
        """The turn of the session whose completion is the longest that `prompt` extends. What this process has
        forgotten, or never knew, is looked for among the session's latest turns."""
        found = await self._trajectories.find_parent(session.id, extended)
        if found is not None:
            return found
        fitting = [turn for turn in recent if prompt.extends(turn.conversation_hash)]
        return max(fitting, key=lambda turn: length_of(turn.conversation_hash), default=None)

    async def _plan(
        self, prompt: RawPrompt, parent: ParentTurn | None, recent: list[ParentTurn]
    ) -> tuple[PromptPlan, int]:
        """With how many bytes of the prompt are recorded along the parent's path."""
        if not isinstance(prompt.given, str):
            turns = [parent, *recent] if parent is not None else recent
            return off_its_owner(plan_ids(self._template, prompt.given, list(map(known_turn, turns))), turns), 0
        answered = await self._trajectories.responses([parent.id]) if parent is not None else []
        if parent is None or not answered:
            plan = plan_text(self._template, prompt.given, list(map(known_turn, recent)))
            return off_its_owner(plan, recent), 0
        covered = length_of(parent.conversation_hash)
        choice = msgspec.convert(answered[0], Answer).choices[0]
        said = SaidAnswer(text=choice.text, tokens=choice.completion_tokens)
        rest = prompt.data[covered:].decode()
        return plan_text_behind(self._template, self._decoder, known_turn(parent), said, rest), covered

    def _planned(self, prompt: RawPrompt, plan: PromptPlan, covered: int) -> PlannedPrompt:
        text = prompt.data[covered:].decode() if prompt.is_text else self._decoder.text(plan.new_ids)
        return PlannedPrompt(
            plan=plan,
            messages=[{"role": "user", "content": text}],
            request_hash=prompt.digest,
            tools_hash=NO_TOOLS,
            raw=prompt,
        )
