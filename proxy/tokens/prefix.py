"""Plan prompts that continue a recorded turn: its ids are reused as they are, and only new messages are tokenised.

Generated text is never tokenised again: it may have other ids (another split of the same characters), and the trainer
would then see tokens that the policy never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.contract.identifiers import TurnId
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import Continuation
from proxy.tokens.messages import Message
from proxy.tokens.shortcut import Rendering, Shortcuts
from proxy.tokens.template import ChatTemplate
from proxy.tokens.thoughts import has_stand_in, keeps_stand_in, with_thoughts


class KnownTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded turn to continue. `path_ids` are its full prompt and its output."""

    id: TurnId
    path_ids: TokenIds
    tools_hash: bytes


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned prompt. `input_ids` are all of its ids: the first `prefix_tokens` of the parent's path, then new
    ones."""

    input_ids: TokenIds
    parent_id: TurnId | None
    prefix_tokens: int
    continuation: Continuation

    @property
    def new_ids(self) -> tuple[int, ...]:
        return self.input_ids[self.prefix_tokens :].unpacked()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a request's prompt.

    `messages` are normalised (`canonical.normalise`). `arguments` are passed to the template. `prefill` is the text
    that the answer is to begin with. `tools_hash` covers `tools` and `arguments`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    tools_hash: bytes
    arguments: Mapping[str, Any] = {}
    prefill: str = ""

    def render(self, template: ChatTemplate) -> str:
        """Return the text of the whole prompt, its contents marked (`ChatTemplate.render`)."""
        rendered = template.render(self.messages, self.tools, generation_prompt=True, arguments=self.arguments)
        return rendered + template.marked_text(self.prefill)

    def encode(self, template: ChatTemplate) -> TokenIds:
        """Return the ids of the whole prompt. Raise ContextLengthExceeded for one that is far too long."""
        text = self.render(template)
        template.check_length(text)
        return template.encode_conversation(text)


def plan_continuation(
    template: ChatTemplate,
    conversation: Conversation,
    parent: KnownTurn,
    covered: int,
    shortcuts: Shortcuts | None = None,
) -> PromptPlan:
    """Plan the prompt of a request whose first `covered` messages are `parent`'s messages and its answer.

    The plan is `exact` if the template only adds to the recorded text, `retemplated` if it renders earlier messages
    differently now (for example without their reasoning), and `edited` if other tools change the earlier text. With
    `shortcuts` the history is not rendered where that is proved to make no difference.
    """
    same_tools = conversation.tools_hash == parent.tools_hash
    if same_tools:
        rendering = Rendering(tools=conversation.tools, arguments=conversation.arguments)
        messages = _recorded(template, conversation.messages, parent, covered)
        rest = shortcuts.behind(messages, rendering, covered) if shortcuts is not None else None
        if rest is None:
            rest = behind(template, messages, rendering, covered)
        if rest is not None:
            return PromptPlan(
                input_ids=parent.path_ids
                + _suffix(template, parent, rest + template.marked_text(conversation.prefill)),
                parent_id=parent.id,
                prefix_tokens=len(parent.path_ids),
                continuation=Continuation.EXACT,
            )
    plan = branch(
        conversation.encode(template),
        [parent],
        Continuation.RETEMPLATED if same_tools else Continuation.EDITED,
    )
    if plan.prefix_tokens == len(parent.path_ids):
        return msgspec.structs.replace(plan, continuation=Continuation.EXACT)
    return plan


def plan_branch(template: ChatTemplate, conversation: Conversation, recent: Sequence[KnownTurn]) -> PromptPlan:
    """Plan the prompt of a request that extends no recorded turn: a branch of the turn with which it shares most
    tokens, or `new` if it shares none. `recent` are turns of its session, latest first."""
    return branch(conversation.encode(template), recent, Continuation.EDITED)


def branch(full_ids: TokenIds, turns: Sequence[KnownTurn], changed: Continuation) -> PromptPlan:
    """Plan `full_ids` as a branch of the turn with which they share most tokens, or as `new` if they share none."""
    best: KnownTurn | None = None
    shared = 0
    for turn in turns:
        common = full_ids.common_prefix(turn.path_ids)
        if common > shared:
            best, shared = turn, common
    if best is None:
        return PromptPlan(input_ids=full_ids, parent_id=None, prefix_tokens=0, continuation=Continuation.NEW)
    return PromptPlan(input_ids=full_ids, parent_id=best.id, prefix_tokens=shared, continuation=changed)


def _recorded(
    template: ChatTemplate, messages: Sequence[Message], parent: KnownTurn, covered: int
) -> Sequence[Message]:
    """Return the messages, with stand-ins for thoughts if the parent's path holds any: the template may strip
    them."""
    if not template.knows_reasoning or not template.holds_thought(parent.path_ids):
        return messages
    return with_thoughts(template, messages, covered)


def behind(template: ChatTemplate, messages: Sequence[Message], rendering: Rendering, covered: int) -> str | None:
    """Return the text behind the answer that is the last of `covered` messages, from the template's closing of that
    answer on; None if the template changes earlier text. Raise InvalidRequest for messages that it refuses."""
    full = _rendered(template, messages, rendering, generation_prompt=True)
    if has_stand_in(messages[covered - 1]) and not keeps_stand_in(full):
        return None
    rest = _behind_history(template, messages, rendering, covered, full)
    return _behind_answer(template, messages, rendering, covered, full) if rest is None else rest


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], rendering: Rendering, *, generation_prompt: bool
) -> str:
    return template.render(
        messages, rendering.tools, generation_prompt=generation_prompt, arguments=rendering.arguments
    )


def _suffix(template: ChatTemplate, parent: KnownTurn, rest: str) -> tuple[int, ...]:
    """Return the ids that follow the parent's path.

    The template closes an answer with a text such as `<|im_end|>` and a line break. The path already holds the part
    that the model generated, up to its stop token; the rest belongs to the new prompt.
    """
    template.check_length(rest)
    last = parent.path_ids[-1] if parent.path_ids else None
    if last not in template.stop_ids:
        return template.encode(rest)
    stop_text = template.token_text(last)
    written = rest.find(stop_text, 0, len(template.closing) + len(stop_text))
    if written >= 0 and not rest[:written].strip():
        rest = rest[written + len(stop_text) :]
    return template.encode_after(last, rest)


def _behind_history(
    template: ChatTemplate, messages: Sequence[Message], rendering: Rendering, covered: int, full: str
) -> str | None:
    """Return the text behind the answer; None if the template renders the conversation up to the answer differently
    once more messages follow."""
    history = _rendered(template, messages[:covered], rendering, generation_prompt=False)
    if not full.startswith(history) or not history.endswith(template.closing):
        return None
    return template.closing + full[len(history) :]


def _behind_answer(
    template: ChatTemplate, messages: Sequence[Message], rendering: Rendering, covered: int, full: str
) -> str | None:
    """Return the text behind the answer for templates that render the last answer differently from earlier ones; None
    if it cannot be found. It is found by the parent's prompt and the answer's text and closing behind it."""
    closing = template.closing
    answer = template.marked_message(messages[covered - 1])
    answer_text = str(answer["content"]).strip()
    calls = str(answer.get("tool_calls", ""))
    if not closing.strip() or closing.strip() in answer_text or closing.strip() in calls:
        return None
    prompt = _rendered(template, messages[: covered - 1], rendering, generation_prompt=True)
    if not full.startswith(prompt):
        return None
    end = full.find(closing, len(prompt))
    if end < 0 or answer_text not in full[len(prompt) : end]:
        return None
    return full[end:]
