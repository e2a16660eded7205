"""Sessions like those of agents, with random words, token ids, log-probabilities and answers.

A turn adds about 130 prompt tokens (a tool's result, a question) and 80 output tokens, with about 4.5 characters of
text per token. Half of the turns belong to conversations of 50 turns, the rest to sessions of 1 and of 8 turns.
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.clock import Clock
from proxy.contract.identifiers import RunId, SessionId, TurnId, new_turn_id
from proxy.contract.turn import (
    Continuation,
    FinishReason,
    SamplingParameters,
    Turn,
    TurnState,
    VersionSpan,
)
from proxy.turns.service import TurnRecord

VOCABULARY = 151_936
PROMPT_TOKENS, OUTPUT_TOKENS = 130, 80
LONG, MIDDLE, SHORT = 50, 8, 1

_SHARES = ((LONG, 0.5), (MIDDLE, 0.35), (SHORT, 0.15))
"""Share of the turns that belongs to sessions of each length."""

_ARTICLES = ("the", "a", "to", "of", "in", "and", "is", "that", "for", "it", "with", "as", "on", "are", "at", "this")
_SYLLABLES = (
    "ra",
    "to",
    "ne",
    "li",
    "ka",
    "ver",
    "mo",
    "si",
    "du",
    "pel",
    "an",
    "tor",
    "ish",
    "men",
    "ga",
    "bel",
    "fi",
)
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} and return what was found, as text.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where to look, relative to the working directory."},
                    "limit": {"type": "integer", "description": "How many results at most.", "default": 20},
                },
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "search_text", "list_directory", "run_tests", "write_file", "look_up_symbol")
]
_SAMPLING = SamplingParameters(max_new_tokens=1024, stop_token_ids=(151_645,))
_REQUEST = {"model": "policy", "temperature": 1.0, "max_tokens": 1024, "stream": True, "tools": _TOOLS}


@dataclass(frozen=True)
class SessionPlan:
    """A session to be made, with its number of turns."""

    turns: int


@dataclass(frozen=True)
class _Content:
    """The content of one turn, drawn once."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    system: str
    question: str
    answer: str
    arguments: str


class Workload:
    """Equal seeds give equal sessions, except for their ids. Turns are drawn from a pool, so that making them is
    cheap compared with storing them. `lengths` replaces the mixture of session lengths."""

    def __init__(self, seed: int, *, lengths: tuple[int, ...] = (), pool: int = 4096) -> None:
        self._shares = tuple((length, 1 / len(lengths)) for length in lengths) or _SHARES
        self._random = random.Random(seed)
        words = [
            "".join(self._random.choices(_SYLLABLES, k=self._random.choice((1, 2, 2, 3, 4)))) for _ in range(6000)
        ]
        self._words = [*_ARTICLES, *words]
        weights = [1 / (rank + 3) for rank in range(len(self._words))]
        self._cumulative = list(itertools.accumulate(weights))
        self._pool = [self._content() for _ in range(pool)]

    def plans(self, turns: int) -> Iterator[SessionPlan]:
        """Yield sessions with about `turns` turns in total."""
        made = 0
        lengths = [length for length, _ in self._shares]
        weights = [share / length for length, share in self._shares]
        while made < turns:
            plan = SessionPlan(turns=self._random.choices(lengths, weights)[0])
            made += plan.turns
            yield plan

    def records(
        self, run_id: RunId, session_id: SessionId, plan: SessionPlan, *, version: int, clock: Clock
    ) -> Iterator[TurnRecord]:
        """Return the turns of one session, each continuing the one before."""
        parent: TurnId | None = None
        path = 0
        for _ in range(plan.turns):
            record = self._record(run_id, session_id, parent, path, version=version, now=clock())
            parent = record.turn.id
            path = record.prompt_token_count + len(record.turn.output_ids)
            yield record

    def _content(self) -> _Content:
        prompt, output = self._ids(PROMPT_TOKENS), self._ids(OUTPUT_TOKENS)
        answer = self._text(len(output))
        half = len(answer) // 2
        return _Content(
            prompt=prompt,
            output=output,
            logprobs=tuple(-self._random.expovariate(2.0) for _ in output),
            system=self._text(40),
            question=self._text(len(prompt)),
            answer=answer[:half],
            arguments=json.dumps({"path": answer[half:], "limit": 20}),
        )

    def _record(
        self, run_id: RunId, session_id: SessionId, parent: TurnId | None, path: int, *, version: int, now: float
    ) -> TurnRecord:
        content = self._random.choice(self._pool)
        turn = Turn(
            id=new_turn_id(),
            session_id=session_id,
            parent_id=parent,
            prefix_tokens=path,
            prompt_ids=content.prompt,
            output_ids=content.output,
            output_logprobs=content.logprobs,
            spans=(VersionSpan(version=version, start=0, end=len(content.output)),),
            sampling=_SAMPLING,
            finish_reason=FinishReason.TOOL_CALLS,
            continuation=Continuation.EXACT if parent is not None else Continuation.NEW,
            state=TurnState.COMPLETE,
            started_at=now,
            first_token_at=now,
            finished_at=now,
        )
        messages: list[dict[str, Any]]
        if parent is None:
            messages = [{"role": "system", "content": content.system}, {"role": "user", "content": content.question}]
        else:
            messages = [{"role": "tool", "tool_call_id": self._call_id(), "content": content.question}]
        return TurnRecord(
            turn=turn,
            run_id=run_id,
            attributed_by="header",
            conversation_hash=self._random.randbytes(16),
            tools_hash=b"t" * 16,
            idempotency_key=None,
            prompt_token_count=path + len(content.prompt),
            messages=messages,
            request=_REQUEST,
            response=self._response(turn, content, path),
        )

    def _response(self, turn: Turn, content: _Content, path: int) -> dict[str, Any]:
        """Return an answer as the proxy records it: a text, and a call of a tool."""
        call = {"id": self._call_id(), "call": {"name": "search_text", "arguments": content.arguments}}
        return {
            "turn_id": turn.id,
            "session_id": turn.session_id,
            "model": "policy",
            "run_name": "policy",
            "created": int(turn.finished_at),
            "prompt_tokens": path + len(turn.prompt_ids),
            "cached_tokens": path,
            "choices": [
                {
                    "turn_id": turn.id,
                    "text": content.answer,
                    "tool_calls": [call],
                    "finish_reason": "tool_calls",
                    "completion_tokens": len(turn.output_ids),
                    "version": turn.spans[0].version,
                    "completed": int(turn.finished_at),
                }
            ],
        }

    def _call_id(self) -> str:
        return f"call_{self._random.getrandbits(96):024x}"

    def _ids(self, mean: int) -> tuple[int, ...]:
        count = max(8, int(self._random.gauss(mean, mean / 3)))
        return tuple(self._random.choices(_IDS, k=count))

    def _text(self, tokens: int) -> str:
        """Return text with about 4.5 characters per token, in which short words are frequent as in a natural
        language."""
        total = self._cumulative[-1]
        found: list[str] = []
        length = 0
        while length < 4.5 * tokens:
            word = self._words[bisect.bisect(self._cumulative, self._random.random() * total)]
            found.append(word)
            length += len(word) + 1
        return " ".join(found)


_IDS = range(VOCABULARY)


def stored_tokens(record: TurnRecord) -> int:
    """Return the number of tokens that a turn adds to the store, without those of its parent's path."""
    return len(record.turn.prompt_ids) + len(record.turn.output_ids)
