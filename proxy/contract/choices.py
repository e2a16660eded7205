"""Which of several answers to one prompt the agent went on with, and which it left behind. Pure.

A call with `n` > 1 makes a turn of every choice, and a call that is sent again makes another turn of the same prompt.
What the session did afterwards, and so its reward, is about the answers that it went on with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from proxy.contract.turn import Continuation


class Prompt(NamedTuple):
    """The prompt of a turn: the first `shared` tokens of its parent's path, and then its `own`, `tokens` in all.

    `parent` is an index into the prompts beside it. `own` is the turn's own prompt ids, or any other value that
    differs where these do.
    """

    parent: int | None
    shared: int
    tokens: int
    own: Hashable


class Asked(NamedTuple):
    """A turn as an answer to its prompt."""

    id: str
    prompt: Prompt
    continuation: Continuation
    started_at: float
    finished_at: float


def prompts_alike(prompts: Sequence[Prompt]) -> list[int]:
    """Return for each prompt the place of the first one that is the same: its own where there is none before it."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        by_length[prompt.tokens].append(place)
    found = list(range(len(prompts)))
    for places in by_length.values():
        if len(places) == 1:  # most prompts of a session have a length of their own: their ids need no hashing
            continue
        first: dict[Hashable, int] = {}
        for place in places:
            found[place] = first.setdefault(_key(prompts[place], prompts), place)
    return found


def superseded_turns(turns: Sequence[Asked]) -> frozenset[str]:
    """Return the turns of one session that the agent did not go on with, having gone on with another answer to the
    same prompt.

    That other answer is a choice of the same call, or the answer to a later call with the same prompt, which began
    when this one had ended: a retry. Calls that ran at the same time do not supersede each other, because agents
    that work in parallel may ask the same. Where no answer to a prompt was gone on with, as at the end of a session,
    none is superseded.
    """
    prompts = [turn.prompt for turn in turns]
    gone_on = {turn.prompt.parent for turn in turns if _goes_on(turn, prompts)}
    answers: dict[int, list[int]] = defaultdict(list)
    for place, first in enumerate(prompts_alike(prompts)):
        answers[first].append(place)
    return frozenset(
        turns[place].id
        for places in answers.values()
        for place in places
        if place not in gone_on and any(each in gone_on and _replaces(turns[each], turns[place]) for each in places)
    )


def _goes_on(turn: Asked, prompts: Sequence[Prompt]) -> bool:
    """Return whether the turn goes on from its parent's answer: its prompt keeps a token of it, or the template wrote
    the recognised conversation anew. A parent that shares only its prompt is no past of the turn."""
    parent, shared, _, _ = turn.prompt
    return parent is not None and (turn.continuation is Continuation.RETEMPLATED or shared > prompts[parent].tokens)


def _replaces(other: Asked, turn: Asked) -> bool:
    """Return whether `other` is a choice of the same call, whose turns begin at one instant, or a later call."""
    return other.started_at == turn.started_at or other.started_at >= turn.finished_at


def _key(prompt: Prompt, prompts: Sequence[Prompt]) -> Hashable:
    """Return a key that two prompts share if they are the same tokens.

    A call that repeats an earlier one may be stored behind it, with that one's whole prompt as its shared tokens.
    """
    while prompt.parent is not None and prompt.shared == prompt.tokens == prompts[prompt.parent].tokens:
        prompt = prompts[prompt.parent]
    return prompt.parent, prompt.shared, prompt.own
