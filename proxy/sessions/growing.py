"""Prompts that grow: all steps of an agent in one user message.

An agent in ReAct's form (task, thought, action, observation, thought, …) sends no answer back as a message of its
own. Its next message begins with the text of the one before, and our answer stands somewhere in the rest. A common
beginning alone proves nothing: "What is 1 + 12" begins with "What is 1 + 1".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

import msgspec

from proxy.contract.identifiers import KeyId

SHORTEST_ANSWER = 16
"""Characters that an answer to a first prompt must have. Another task's text may contain a number, a yes, a name or a
small JSON object by chance; a thought with its action is longer."""

LONGEST_PROMPT = 1 << 18
"""Characters. To hash so many takes less than a millisecond, in which other calls wait."""

_HEAD = 64
"""Characters of an answer that are kept as text, to search for; the rest is compared by its hash."""
_OCCURRENCES = 4
"""How many places that begin like the answer are compared with it, so that repetitive texts cost no more."""
_STEPS_OF_FRAME = 512
"""How many steps of one key, system prompt and tools are compared with a call, the newest. That is enough for a few
hundred runs at once, since the newest step of each is what counts."""
_STEPS = 16_384
"""Of all keys: about 10 MB."""

_DIGEST = 16


class LonePrompt(msgspec.Struct, frozen=True):
    """A conversation of one user message behind nothing but system messages.

    `frame` is the hash of the system messages and of the tools; `text` comes without white space around it.
    """

    frame: bytes
    text: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded prompt and the answer to it: its text's length and hash; the answer's head, length and hash.

    `id` is equal for equal prompts with equal answers.
    """

    id: bytes
    length: int
    digest: bytes
    head: str
    answer_length: int
    answer_digest: bytes

    def answer_within(self, text: str, digests: Mapping[int, bytes]) -> int | None:
        """Return where the answer is in `text`, behind the prompt; None if the text does not continue this step.

        `digests` are the hashes of the text's beginnings (`beginnings`), by length.
        """
        if digests.get(self.length) != self.digest:
            return None
        position = self.length - 1
        for _ in range(_OCCURRENCES):
            position = text.find(self.head, position + 1)
            if position < 0:
                return None
            if _digest(text[position : position + self.answer_length]) == self.answer_digest:
                return position
        return None


def step_of(prompt: LonePrompt, answer: str) -> Step:
    """Return the step of a prompt and its answer, which is not blank."""
    answer = answer.strip()
    digest, answer_digest = _digest(prompt.text), _digest(answer)
    return Step(
        id=blake2b(prompt.frame + digest + answer_digest, digest_size=_DIGEST, person=b"growing prompt").digest(),
        length=len(prompt.text),
        digest=digest,
        head=answer[:_HEAD],
        answer_length=len(answer),
        answer_digest=answer_digest,
    )


def beginnings(text: str, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the hashes of the text's beginnings of these lengths, as far as it is as long, in one pass."""
    hasher, done, digests = blake2b(digest_size=_DIGEST), 0, {}
    for length in sorted(set(lengths)):
        if length > len(text):
            break
        hasher.update(_bytes(text[done:length]))
        done, digests[length] = length, hasher.digest()
    return digests


def continued_steps(text: str, steps: Iterable[Step]) -> list[Step]:
    """Return the steps that a prompt of this text goes on from, the best first.

    That is the longest prompt, so that the third step of a run continues the second; then the answer that stands
    nearest to it, because a short one may also be part of an observation; then the longest answer, because one may
    begin with another.
    """
    shorter = [step for step in steps if step.length < len(text)]
    digests = beginnings(text, (step.length for step in shorter))
    ranked: list[tuple[int, int, int, Step]] = []
    for step in shorter:
        position = step.answer_within(text, digests)
        if position is not None:
            ranked.append((-step.length, position, -step.answer_length, step))
    return [step for *_, step in sorted(ranked, key=lambda entry: entry[:3])]


class GrowingPrompts:
    """The newest steps of every key and frame; bounded, and of this process alone."""

    def __init__(self, kept: int = _STEPS) -> None:
        self._kept = kept
        self._frames: dict[tuple[KeyId, bytes], OrderedDict[bytes, Step]] = {}
        self._ages: OrderedDict[tuple[KeyId, bytes, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ages)

    def add(self, key_id: KeyId, prompt: LonePrompt, answer: str, *, has_grown: bool) -> bytes | None:
        """Remember a step and return its id; None for an answer that is too short to be told from chance.

        `has_grown`: the prompt holds an answer of ours already. No other task begins so, and any answer will do.
        """
        if len(answer.strip()) < (1 if has_grown else SHORTEST_ANSWER):
            return None
        step = step_of(prompt, answer)
        self._drop(key_id, prompt.frame, step.id)  # added again, it is the newest
        steps = self._frames.setdefault((key_id, prompt.frame), OrderedDict())
        steps[step.id] = step
        self._ages[key_id, prompt.frame, step.id] = None
        if len(steps) > _STEPS_OF_FRAME:
            self._drop(key_id, prompt.frame, next(iter(steps)))
        if len(self._ages) > self._kept:
            self._drop(*next(iter(self._ages)))
        return step.id

    def continued(self, key_id: KeyId, prompt: LonePrompt) -> list[bytes]:
        """Return the ids of the steps that the prompt goes on from, the best first."""
        steps = self._frames.get((key_id, prompt.frame))
        return [step.id for step in continued_steps(prompt.text, steps.values())] if steps else []

    def drop_where(self, is_unwanted: Callable[[KeyId, bytes], bool]) -> None:
        """Forget the steps of which that is true, given key and id."""
        for key_id, frame, step_id in list(self._ages):
            if is_unwanted(key_id, step_id):
                self._drop(key_id, frame, step_id)

    def _drop(self, key_id: KeyId, frame: bytes, step_id: bytes) -> None:
        if (key_id, frame, step_id) not in self._ages:
            return
        del self._ages[key_id, frame, step_id]
        steps = self._frames[key_id, frame]
        del steps[step_id]
        if not steps:
            del self._frames[key_id, frame]


def _digest(text: str) -> bytes:
    return blake2b(_bytes(text), digest_size=_DIGEST).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can hold lone surrogates
