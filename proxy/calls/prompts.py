"""Plan the token ids of a call's prompt: the ids of the recorded turn that it extends, and the new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from proxy.calls.bounds import HUGE_BYTES, LARGE_TEXT
from proxy.calls.call import ModelCall
from proxy.calls.conversation import ConversationIndex, ReadConversation
from proxy.contract.identifiers import TurnId
from proxy.contract.turn import Continuation
from proxy.http.workers import Workers
from proxy.sessions.growing import LONGEST_PROMPT, LonePrompt
from proxy.sessions.identification import SessionContext
from proxy.tokens.canonical import NormalMessages, tools_hash
from proxy.tokens.prefix import Conversation, KnownTurn, PromptPlan, behind, plan_branch, plan_continuation
from proxy.tokens.raw import RawPrompt
from proxy.tokens.shortcut import Shortcuts
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import ParentTurn, TrajectoryStore

_Result = TypeVar("_Result")

RECENT_TURNS = 8
"""A call that extends no recorded conversation is compared with this many of the latest turns for common tokens."""


class PlannedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, and the facts that are recorded with it.

    `messages` are those that are not recorded along the parent's path. `request_hash` is the hash of the
    conversation, `tools_hash` the hash of tools and template arguments. `raw` is the prompt of a call without
    messages.
    """

    plan: PromptPlan
    messages: list[dict[str, Any]]
    request_hash: bytes
    tools_hash: bytes
    settled_hash: bytes | None = None
    raw: RawPrompt | None = None


class PromptPlanner:
    """Plans the prompts of calls; `workers` do it for large calls."""

    def __init__(self, template: ChatTemplate, trajectories: TrajectoryStore, workers: Workers) -> None:
        self._template = template
        self._trajectories = trajectories
        self._workers = workers
        self._shortcuts = Shortcuts(template, behind)
        self._conversations = ConversationIndex()

    def read(self, call: ModelCall) -> ReadConversation:
        """Return the call's conversation. Threads may call it.

        Raise InvalidRequest for invalid messages, ContextLengthExceeded for a message that is longer than the context
        by itself.
        """
        if call.body_bytes > HUGE_BYTES:
            self._check_lengths(call)
        asked = self._conversations.read(call.messages)
        self._conversations.keep(asked)
        if call.is_large:
            asked.prepare()
        return asked

    async def lone_prompt(self, call: ModelCall, asked: ReadConversation) -> LonePrompt | None:
        """Return the call's only user message, if there is one: agents may write all their steps into it."""
        lone = asked.lone_message
        text = lone[1].strip() if lone is not None and len(lone[1]) <= LONGEST_PROMPT else ""
        if lone is None or not text:
            return None
        tools = await self._work(call, lambda: tools_hash(call.tools, call.template_arguments))
        return LonePrompt(lone[0] + tools, text)

    async def plan(self, call: ModelCall, asked: ReadConversation, session: SessionContext) -> PlannedPrompt:
        """Find the turn that the call continues, then render and tokenise the new messages.

        Raise InvalidRequest when the template refuses the messages, ContextLengthExceeded.
        """
        parent = await self._parent(call, asked, session)
        recent: list[ParentTurn] = []
        if parent is None and not session.is_new:
            recent = await self._trajectories.recent_turns(session.id, RECENT_TURNS)
        # Templates drop or move reasoning of earlier turns: such conversations are rendered whole.
        shortcuts = self._shortcuts if asked.plain else None
        plan = partial(self._plan, call, asked, parent, recent, shortcuts)
        if call.is_large or _has_much_new(call, asked, parent):
            return await self._workers.run(plan)
        return plan()

    def _plan(
        self,
        call: ModelCall,
        asked: ReadConversation,
        parent: ParentTurn | None,
        recent: list[ParentTurn],
        shortcuts: Shortcuts | None,
    ) -> PlannedPrompt:
        conversation = _conversation(call)
        covered = 0
        if parent is not None:
            extended = asked.length_at(parent.conversation_hash)
            plan = plan_continuation(self._template, conversation, known_turn(parent), extended, shortcuts)
            if plan.continuation in (Continuation.EXACT, Continuation.RETEMPLATED):
                covered = extended
        else:
            known = [known_turn(turn) for turn in recent]
            plan = off_the_owner(plan_branch(self._template, conversation, known), recent)
        return PlannedPrompt(
            plan=plan,
            messages=[*call.messages[covered:], *_begun(call)],
            request_hash=asked.hash,
            settled_hash=asked.settled_hash,
            tools_hash=conversation.tools_hash,
        )

    async def _parent(self, call: ModelCall, asked: ReadConversation, session: SessionContext) -> ParentTurn | None:
        """Find the turn of the session that the call extends; among equal turns, the one whose id it sends back."""
        if session.is_new:  # it has no turns: saves the query
            return None
        named = asked.named if call.previous is None else (call.previous.turn_id, *asked.named)
        restored = await self._restored(asked)
        hashes: Sequence[bytes] = asked.answered
        if restored:
            hashes = await self._work(call, lambda: [*restored, *asked.answered])
        tools = await self._work(call, lambda: tools_hash(call.tools, call.template_arguments))
        return await self._trajectories.find_parent(session.id, hashes, tools_hash=tools, named=named)

    async def _work(self, call: ModelCall, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work`, which a worker does for a large call: it would block the event loop."""
        return await self._workers.run(work) if call.is_large else work()

    async def _restored(self, asked: ReadConversation) -> tuple[bytes, ...]:
        """Return the conversation's hash with the text of its last answer, if the client dropped that text."""
        turn_id = asked.textless_answer
        if turn_id is None:
            return ()
        responses = await self._trajectories.responses([turn_id])
        text = responses[0]["choices"][0]["text"] if responses else ""
        return (asked.restore(text),) if text.strip() else ()

    async def count(self, call: ModelCall) -> int:
        """Count the tokens that the prompt would have as the first of its session. Raise InvalidRequest."""
        return len(await self._workers.run(lambda: _conversation(call).encode(self._template)))

    def _check_lengths(self, call: ModelCall) -> None:
        """Raise ContextLengthExceeded for a message that does not fit the context by itself, before it is hashed and
        rendered. Answers are not checked: templates may drop the reasoning in them."""
        for message in call.messages:
            content = message.get("content")
            if isinstance(content, str) and message["role"] != "assistant":
                self._template.check_length(content)


def _has_much_new(call: ModelCall, asked: ReadConversation, parent: ParentTurn | None) -> bool:
    """Return whether the messages after `parent` take more than a few milliseconds to render and tokenise."""
    first = asked.length_at(parent.conversation_hash) if parent is not None else 0
    return sum([len(str(message.get("content"))) for message in call.messages[first:]]) > LARGE_TEXT


def _conversation(call: ModelCall) -> Conversation:
    return Conversation(
        messages=NormalMessages(call.messages),
        tools=call.tools,
        tools_hash=tools_hash(call.tools, call.template_arguments),
        arguments=call.template_arguments,
        prefill=call.prefill,
    )


def _begun(call: ModelCall) -> list[dict[str, Any]]:
    """Return the prefill of the answer as a message, for people who read the record."""
    return [{"role": "assistant", "content": call.prefill}] if call.prefill else []


def off_the_owner(plan: PromptPlan, turns: Sequence[ParentTurn]) -> PromptPlan:
    """Return the plan of a branch with another parent: the turn in which the shared tokens end.

    Later turns of the path share nothing with the branch.
    """
    for turn in turns:
        if turn.id == plan.parent_id:
            return msgspec.structs.replace(plan, parent_id=TurnId(turn.lineage.owner(plan.prefix_tokens)))
    return plan


def known_turn(turn: ParentTurn) -> KnownTurn:
    return KnownTurn(id=turn.id, path_ids=turn.path_ids, tools_hash=turn.tools_hash)
