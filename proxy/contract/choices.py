"""Superseded turns: answers that the agent replaced by another answer to the same prompt. Pure.

A call with `n` > 1 records a turn for every choice, and a call that is sent again records another turn of the same
prompt. The rest of the session, and so its reward, follows from the answers that the agent continued from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from proxy.contract.turn import Continuation


class Prompt(NamedTuple):
    """The prompt of a turn: the first `shared` tokens of its parent's path, then its `own`; `tokens` in total.

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
    """Return for each prompt the index of the first equal one: its own if no earlier prompt is equal."""
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
    """Return the ids of one session's turns that were superseded: the agent continued from another answer to the same
    prompt instead.

    That other answer is another choice of the same call, or the answer to a retry: a call with the same prompt that
    began after this one had ended. Calls that ran at the same time do not supersede each other, because agents that
    work in parallel may send equal prompts. If the agent continued from no answer to a prompt, as at the end of a
    session, none is superseded.
    """
    prompts = [turn.prompt for turn in turns]
    continued = {turn.prompt.parent for turn in turns if _continues_parent(turn, prompts)}
    answers: dict[int, list[int]] = defaultdict(list)
    for place, first in enumerate(prompts_alike(prompts)):
        answers[first].append(place)
    return frozenset(
        turns[place].id
        for places in answers.values()
        for place in places
        if place not in continued
        and any(each in continued and _replaces(turns[each], turns[place]) for each in places)
    )


def _continues_parent(turn: Asked, prompts: Sequence[Prompt]) -> bool:
    """Return whether the turn continues its parent's answer: its prompt reuses a token of the answer, or the template
    rendered the recognised conversation differently. A parent that shares only its prompt does not count."""
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
