"""Hints: the message with the texts of feedback, as tokens, and its places in the prompts of a session.

The trainer's teacher is the policy that reads a turn's prompt with the hints in it. A text about the session has its
place before the first answer of each path, so that every turn of the path is read with it; a text about a turn has
its place before that turn's answer, and only this turn is read with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from proxy.contract.arrays import pack_ids
from proxy.contract.identifiers import TurnId
from proxy.contract.trajectory import Feedback, Trajectory, TrajectoryTurn
from proxy.errors import InvalidRequest
from proxy.lifecycle.texts import FeedbackEntry
from proxy.settings import TextSettings
from proxy.tokens.template import ChatTemplate

# Tokens of a prompt's end in which the opening of the answer is searched. Behind it there may be the beginning of a
# thought that the template writes, or of an answer that the client wrote.
_TAIL = 64

_QUESTION = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": "!"}


class HintMaker:
    """Makes the hints of one run. Raise InvalidRequest if the model's template cannot write its message."""

    def __init__(self, template: ChatTemplate, settings: TextSettings) -> None:
        self._template = template
        self._settings = settings
        asked = self._render([_QUESTION])
        opened = template.render([_QUESTION], None, generation_prompt=True)
        self._opening = template.encode(opened.removeprefix(asked)) if opened.startswith(asked) else ()
        if not self._opening:
            raise InvalidRequest("the model's chat template has no opening of an answer")
        self._before = self._conversation_before()

    def with_hints(self, trajectory: Trajectory, entries: Sequence[FeedbackEntry]) -> Trajectory:
        """Return the trajectory with the hints of its texts. A turn in whose prompt the opening of its answer is not
        found, such as a raw completion, has none."""
        about: dict[str | None, list[str]] = {}
        for entry in entries:
            about.setdefault(entry.turn_id, []).append(entry.text)
        subjects = list(about)
        places = _places(trajectory.turns, self._opening)
        turns = tuple(
            msgspec.structs.replace(turn, hints=_hints_of(turn, subjects, first, own))
            for turn, (first, own) in zip(trajectory.turns, places, strict=True)
        )
        hints = tuple(pack_ids(self._ids(about[subject])) for subject in subjects)
        return msgspec.structs.replace(trajectory, turns=turns, hints=hints)

    def _ids(self, texts: list[str]) -> tuple[int, ...]:
        """Return the tokens of the message with these texts."""
        return self._template.encode(self._message(self._before, self._settings.content(texts)))

    def _conversation_before(self) -> list[dict[str, str]]:
        """Return a conversation that the template lets the message follow."""
        # Some templates want roles to alternate, so that a user's message cannot follow another one.
        try:
            self._message([_QUESTION], "")
        except InvalidRequest:
            self._message([_QUESTION, _ANSWER], "")
            return [_QUESTION, _ANSWER]
        return [_QUESTION]

    def _message(self, before: list[dict[str, str]], content: str) -> str:
        """Return what the message adds to the rendered conversation. Raise InvalidRequest if it changes what came
        before."""
        rendered = self._render(before)
        with_message = self._render([*before, {"role": self._settings.role, "content": content}])
        if not with_message.startswith(rendered):
            raise InvalidRequest(
                f"the model's chat template cannot write a message of the role {self._settings.role} there"
            )
        return with_message.removeprefix(rendered)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._template.render(messages, None, generation_prompt=False)


def contract_feedback(entries: Sequence[FeedbackEntry]) -> tuple[Feedback, ...]:
    """Return the texts as the trainer gets them."""
    return tuple(
        Feedback(
            turn_id=None if entry.turn_id is None else TurnId(entry.turn_id), text=entry.text, source=entry.source
        )
        for entry in entries
    )


def _hints_of(
    turn: TrajectoryTurn, subjects: Sequence[str | None], first: int | None, own: int | None
) -> tuple[tuple[int, int], ...]:
    """Return the places of a turn's hints, each with the index of its subject. `first` is the place of texts about
    the session, `own` that of texts about the turn."""
    places = ((None, first), (turn.id, own))
    return tuple(
        (place, subjects.index(subject)) for subject, place in places if place is not None and subject in subjects
    )


def _places(turns: Sequence[TrajectoryTurn], opening: tuple[int, ...]) -> list[tuple[int | None, int | None]]:
    """Return for each turn the place of the first answer's opening on its path and the place of its own."""
    paths: list[tuple[int, ...]] = []
    found: list[tuple[int | None, int | None]] = []
    for turn in turns:
        prefix = () if turn.parent is None else paths[turn.parent][: turn.prefix_tokens]
        prompt = prefix + turn.prompt_ids
        own = _last_place(prompt, opening)
        first = None if turn.parent is None else found[turn.parent][0]
        # The parent's place is not in this path if the turn shares less of it.
        if first is None or first + len(opening) > turn.prefix_tokens:
            first = own
        found.append((first, own))
        paths.append(prompt + turn.output_ids)
    return found


def _last_place(prompt: tuple[int, ...], opening: tuple[int, ...]) -> int | None:
    """Return where the last opening in the prompt's tail begins; None if there is none, or nothing is before it."""
    last = len(prompt) - len(opening)
    for place in range(last, max(0, last - _TAIL), -1):
        if prompt[place : place + len(opening)] == opening:
            return place
    return None
