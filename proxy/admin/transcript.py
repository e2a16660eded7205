"""A session's turns, prepared for the template. Pure; messages of any shape are shown, none raises an error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.admin.formatting import heat, probability
from proxy.contract.choices import Asked, Prompt, superseded_turns
from proxy.contract.turn import Continuation, FinishReason, TurnState
from proxy.overview.rewards.views import RewardItem
from proxy.overview.sessions.views import TurnView

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_ONE_LINE = 72


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model. `arguments` is pretty-printed JSON, or the raw text if it is not JSON (`is_json`)."""

    id: str
    name: str
    arguments: str
    is_json: bool


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the conversation. An unknown role becomes `other`, with the role's name as `title`."""

    role: str
    title: str
    text: str
    is_json: bool
    reasoning: str
    calls: tuple[ToolCall, ...]
    is_answer: bool


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """An output token. `heat` grades its surprise from 0 to 8. `starts_version` is the policy version that begins at
    this token, None if the version did not change."""

    text: str
    id: int
    heat: int
    logprob: float
    probability: str
    starts_version: int | None


class DrawnTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn, ready for the template.

    `branch` describes where the turn branches off; None if it continues the previous turn. `untrained_because` is the
    reason, as a clause, why the turn is not trained; None if it can be. `is_cut`: the answer was cut off before the
    model ended it. `superseded`: the agent continued from another answer to the same prompt.
    """

    number: int
    view: TurnView
    messages: tuple[Message, ...]
    branch: str | None
    rewards: tuple[RewardItem, ...]
    tokens: tuple[Token, ...]
    untrained_because: str | None = None
    is_cut: bool = False
    superseded: bool = False


def draw(
    turns: Sequence[TurnView], rewards: Sequence[RewardItem], untrained: Mapping[str, str] | None = None
) -> tuple[DrawnTurn, ...]:
    """Prepare a session's turns, given in order of arrival. `untrained` maps turn ids to the reason, as a clause, why
    the turn is not trained."""
    numbered = {turn.id: (number, turn) for number, turn in enumerate(turns, start=1)}
    superseded = superseded_turns(_asked(turns))
    tool_names: dict[str, str] = {}
    drawn: list[DrawnTurn] = []
    for number, turn in enumerate(turns, start=1):
        # A shadow answer has the prompt of an answer before it.
        asked = () if turn.state == TurnState.SHADOW else turn.messages
        messages = [_message(message, tool_names, is_answer=False) for message in asked]
        if turn.answer is not None:
            messages.append(_message(turn.answer, tool_names, is_answer=True))
        drawn.append(
            DrawnTurn(
                number=number,
                view=turn,
                messages=tuple(messages),
                branch=_branch(number, turn, numbered.get(turn.parent_id or "")),
                rewards=tuple(reward for reward in rewards if reward.turn_id == turn.id),
                tokens=tuple(_tokens(turn)),
                untrained_because=(untrained or {}).get(turn.id),
                is_cut=turn.finish_reason == FinishReason.LENGTH and turn.state != TurnState.FAILED,
                superseded=turn.id in superseded and turn.state == TurnState.COMPLETE,
            )
        )
    return tuple(drawn)


def _asked(turns: Sequence[TurnView]) -> list[Asked]:
    """Return the turns in the form in which superseded answers are found."""
    # Token ids are not loaded here, so a turn's own messages stand for the prompt ids that it added.
    places = {turn.id: place for place, turn in enumerate(turns)}
    return [
        Asked(
            turn.id,
            Prompt(
                places.get(turn.parent_id or ""),
                turn.prefix_tokens,
                turn.prompt_tokens,
                json.dumps(turn.messages, sort_keys=True),
            ),
            Continuation(turn.continuation),
            turn.started_at,
            turn.finished_at,
        )
        for turn in turns
    ]


def _branch(number: int, turn: TurnView, parent: tuple[int, TurnView] | None) -> str | None:
    if turn.state == TurnState.SHADOW:
        return "another answer to the same prompt"
    if parent is None:
        return "a conversation of its own" if number > 1 else None
    parent_number, parent_turn = parent
    whole = parent_turn.prompt_tokens + parent_turn.output_tokens
    if turn.continuation == Continuation.EDITED and turn.prefix_tokens < whole:
        return f"branches off within turn {parent_number}"
    return f"branches off after turn {parent_number}" if parent_number != number - 1 else None


def _message(message: Mapping[str, Any], tool_names: dict[str, str], *, is_answer: bool) -> Message:
    role = str(message.get("role") or ("assistant" if is_answer else "unknown"))
    calls = tuple(_calls(message))
    tool_names.update((call.id, call.name) for call in calls)
    text, is_json = _text(message.get("content"))
    title = role
    if role == "tool":
        title = tool_names.get(str(message.get("tool_call_id")), "") or str(message.get("name") or "")
        pretty = pretty_json(text)
        text, is_json = (pretty, True) if pretty is not None else (text, False)
    return Message(
        role=role if role in _ROLES else "other",
        title=title,
        text=text,
        is_json=is_json,
        reasoning=_text(message.get("reasoning_content") or message.get("reasoning"))[0],
        calls=calls,
        is_answer=is_answer,
    )


def _calls(message: Mapping[str, Any]) -> Iterable[ToolCall]:
    stored = message.get("tool_calls")
    for call in stored if isinstance(stored, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        pretty = pretty_json(raw)
        yield ToolCall(
            id=str(call.get("id") or ""),
            name=str(function.get("name") or "unnamed"),
            arguments=raw if pretty is None else pretty,
            is_json=pretty is not None,
        )


def _text(content: Any) -> tuple[str, bool]:
    """Return the text of a message's content, and whether it is JSON because the content was no plain text."""
    if content is None:
        return "", False
    if isinstance(content, str):
        return content, False
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "\n".join(texts), False
    return json.dumps(content, ensure_ascii=False, indent=2), True


def pretty_json(text: str) -> str | None:
    """Format a JSON object or list, on one line if it is short; return None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
        return None
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= _ONE_LINE else json.dumps(value, ensure_ascii=False, indent=2)


def _tokens(turn: TurnView) -> Iterable[Token]:
    if turn.tokens is None:
        return
    texts = turn.tokens.output_texts
    begins = {span.start: span.version for span in turn.spans[1:]}
    for position, (token_id, logprob) in enumerate(
        zip(turn.tokens.output_ids, turn.tokens.output_logprobs, strict=True)
    ):
        yield Token(
            text=texts[position] if texts is not None else str(token_id),
            id=token_id,
            heat=heat(logprob),
            logprob=logprob,
            probability=probability(logprob),
            starts_version=begins.get(position),
        )
