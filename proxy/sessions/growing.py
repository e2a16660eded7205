"""Growing prompts: agents that send all of their steps in one user message.

An agent in ReAct's form (task, thought, action, observation, thought, …) does not send answers back as messages of
their own. Its next message begins with the text of the previous one and contains our answer somewhere behind it. A
common beginning alone is no evidence: "What is 1 + 12" begins with "What is 1 + 1".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

import msgspec

from proxy.contract.identifiers import KeyId

SHORTEST_ANSWER = 16
"""The least number of characters in an answer to a first prompt that can be recognised in a later one. Another task's
text may contain a number, a yes, a name or a small JSON object by chance; a thought with its action is longer."""

LONGEST_PROMPT = 1 << 18
"""The most characters of a prompt that is compared. Hashing them takes less than a millisecond, which delays other
calls."""

# Characters at the beginning of an answer that are stored as text, to search for them; the rest is stored as a hash.
HEAD = 64
# Places with the head of an answer that are compared with the whole answer: bounds the cost of repetitive texts.
OCCURRENCES = 4
# The newest steps of one key, system prompt and tools that are compared with a call. This suffices for a few hundred
# agents in parallel, because only the newest step of each matters.
_STEPS_OF_FRAME = 512
# Steps of all keys together: about 10 MB.
_STEPS = 16_384

_DIGEST = 16


class LonePrompt(msgspec.Struct, frozen=True):
    """A conversation of a single user message, except for system messages before it.

    `frame` is the hash of the system messages and of the tools; `text` has no white space around it.
    """

    frame: bytes
    text: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded prompt and its answer, without their texts: the length and hash of the prompt, and the head, length
    and hash of the answer. `id` is equal for equal prompts with equal answers."""

    id: bytes
    length: int
    digest: bytes
    head: str
    answer_length: int
    answer_digest: bytes

    def answer_within(self, text: str, digests: Mapping[int, bytes]) -> int | None:
        """Return the index of the answer in `text`, behind the prompt; None if the text does not continue this step.

        `digests` are the hashes of the text's beginnings (`beginnings`), by length.
        """
        if digests.get(self.length) != self.digest:
            return None
        position = self.length - 1
        for _ in range(OCCURRENCES):
            position = text.find(self.head, position + 1)
            if position < 0:
                return None
            if _digest(text[position : position + self.answer_length]) == self.answer_digest:
                return position
        return None


def step_of(prompt: LonePrompt, answer: str) -> Step:
    """Return the step that consists of a prompt and its answer. The answer must not be blank."""
    answer = answer.strip()
    digest, answer_digest = _digest(prompt.text), _digest(answer)
    return Step(
        id=blake2b(prompt.frame + digest + answer_digest, digest_size=_DIGEST, person=b"growing prompt").digest(),
        length=len(prompt.text),
        digest=digest,
        head=answer[:HEAD],
        answer_length=len(answer),
        answer_digest=answer_digest,
    )


def beginnings(text: str, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the hashes of the text's beginnings by length, for those of `lengths` that it reaches, in one pass."""
    hasher, done, digests = blake2b(digest_size=_DIGEST), 0, {}
    for length in sorted(set(lengths)):
        if length > len(text):
            break
        hasher.update(_bytes(text[done:length]))
        done, digests[length] = length, hasher.digest()
    return digests


def continued_steps(text: str, steps: Iterable[Step]) -> list[Step]:
    """Return the steps that a prompt with this text continues, the best first.

    The longest prompt comes first, so that the third step of an agent continues the second. Then the answer nearest
    to its prompt, because a short one may also be part of an observation. Then the longest answer, because one answer
    may begin with another.
    """
    shorter = [step for step in steps if step.length < len(text)]
    digests = beginnings(text, (step.length for step in shorter))
    ranked: list[tuple[int, int, int, Step]] = []
    for step in shorter:
        position = step.answer_within(text, digests)
        if position is not None:
            ranked.append((-step.length, position, -step.answer_length, step))
    return [step for *_, step in sorted(ranked, key=lambda entry: entry[:3])]


class _Frame:
    """The steps of one key, system prompt and tools by id, the oldest first; also by length and digest of the prompt,
    so that a call is compared with the prompts that it begins with, and not with hundreds."""

    def __init__(self) -> None:
        self.steps: OrderedDict[bytes, Step] = OrderedDict()
        self._by_prompt: dict[int, dict[bytes, list[Step]]] = {}

    def add(self, step: Step) -> None:
        self.steps[step.id] = step
        self._by_prompt.setdefault(step.length, {}).setdefault(step.digest, []).append(step)

    def drop(self, step_id: bytes) -> None:
        step = self.steps.pop(step_id)
        of_length = self._by_prompt[step.length]
        of_length[step.digest].remove(step)
        if not of_length[step.digest]:
            del of_length[step.digest]
        if not of_length:
            del self._by_prompt[step.length]

    def continued(self, text: str) -> list[Step]:
        """Return the steps that a prompt with this text continues, the best first."""
        digests = beginnings(text, self._by_prompt)
        begun = [step for length, digest in digests.items() for step in self._by_prompt[length].get(digest, ())]
        return continued_steps(text, begun) if begun else []


class GrowingPrompts:
    """The newest steps of every key and frame that this process recorded, at most `most`."""

    def __init__(self, most: int = _STEPS) -> None:
        self._most = most
        self._frames: dict[tuple[KeyId, bytes], _Frame] = {}
        self._ages: OrderedDict[tuple[KeyId, bytes, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ages)

    def add(self, key_id: KeyId, prompt: LonePrompt, answer: str, *, has_grown: bool) -> bytes | None:
        """Add a step and return its id, or None for an answer so short that it could occur by chance.

        With `has_grown` the prompt already contains an answer of ours. No other task begins with that, so an answer
        of any length suffices.
        """
        if len(answer.strip()) < (1 if has_grown else SHORTEST_ANSWER):
            return None
        step = step_of(prompt, answer)
        self._drop(key_id, prompt.frame, step.id)  # so that adding it again makes it the newest
        frame = self._frames.get((key_id, prompt.frame))
        if frame is None:
            frame = self._frames[key_id, prompt.frame] = _Frame()
        frame.add(step)
        self._ages[key_id, prompt.frame, step.id] = None
        if len(frame.steps) > _STEPS_OF_FRAME:
            self._drop(key_id, prompt.frame, next(iter(frame.steps)))
        if len(self._ages) > self._most:
            self._drop(*next(iter(self._ages)))
        return step.id

    def continued(self, key_id: KeyId, prompt: LonePrompt) -> list[bytes]:
        """Return the ids of the steps that the prompt continues, the best first."""
        frame = self._frames.get((key_id, prompt.frame))
        return [step.id for step in frame.continued(prompt.text)] if frame is not None else []

    def drop_where(self, is_unwanted: Callable[[KeyId, bytes], bool]) -> None:
        """Drop the steps for whose key and id `is_unwanted` returns true."""
        for key_id, frame, step_id in list(self._ages):
            if is_unwanted(key_id, step_id):
                self._drop(key_id, frame, step_id)

    def _drop(self, key_id: KeyId, frame: bytes, step_id: bytes) -> None:
        if (key_id, frame, step_id) not in self._ages:
            return
        del self._ages[key_id, frame, step_id]
        self._frames[key_id, frame].drop(step_id)
        if not self._frames[key_id, frame].steps:
            del self._frames[key_id, frame]


def _digest(text: str) -> bytes:
    return blake2b(_bytes(text), digest_size=_DIGEST).digest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may contain lone surrogates
