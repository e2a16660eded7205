"""A teacher: an engine that serves another model and scores the tokens that the policy drew.

It must speak SGLang's API: `/generate` with `logprob_start_len` scores an input. Its log-probabilities are at
temperature 1. It must have the policy's tokens, which is checked at the start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import structlog

from proxy.contract.trajectory import Trajectory
from trainer.batching.sequences import TrainingSequence
from trainer.batching.teaching import Taught
from trainer.config import TeacherSettings
from trainer.errors import ConfigurationError, TeacherSilent, TeacherUnusable

# Seconds. Pauses double from the first to the longest, so that an engine that starts is not flooded.
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0

_log = structlog.get_logger("trainer.teacher")


class Teacher:
    """A client of the teacher's engine. Only the first rank uses it. `transport` replaces the network in tests."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if settings.url is None:
            raise ConfigurationError("trainer.teacher.url: there is none")
        self.patience: float | None = None
        """Seconds after which a teacher that does not answer is given up with TeacherSilent; None: never."""
        self._settings = settings
        self._pause = pause
        key = settings.api_key.get_secret_value()
        self._http = httpx.Client(
            base_url=settings.url.rstrip("/"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(settings.timeout_seconds, connect=5.0),
            transport=transport,
        )

    def check(self, base: Path) -> None:
        """Check that the teacher has the tokens of the policy, whose files are in `base`. Raises
        ConfigurationError."""
        told = self._patiently("GET", "/get_model_info", None)
        named = self._settings.tokenizer or told.get("tokenizer_path") or told.get("model_path")
        theirs = Path(str(named)) / "tokenizer.json"
        ours = base / "tokenizer.json"
        if not theirs.is_file():
            raise ConfigurationError(
                f"trainer.teacher.tokenizer: there is no {theirs} here to tell whether the teacher has the policy's"
                " tokens; name a directory with the teacher's tokenizer.json"
            )
        if not ours.is_file():
            raise ConfigurationError(f"{ours}: the base model has no tokenizer.json to compare the teacher's with")
        other = differing(_vocabulary(ours), _vocabulary(theirs))
        if other is not None:
            raise ConfigurationError(
                f"trainer.teacher.url: the teacher {told.get('model_path')} has other tokens than the policy, for"
                f" example {other}: it cannot say what it gives to the policy's. Use a teacher of the same tokenizer"
            )

    def scores(self, trajectories: Sequence[Trajectory], sequences: Sequence[TrainingSequence]) -> Taught:
        """Return the teacher's log-probabilities of the trained tokens. Waits for a teacher that is down.

        Raises TeacherUnusable if it refuses, TeacherSilent if it does not answer within `patience`.
        """
        with ThreadPoolExecutor(self._settings.concurrency, "teacher") as threads:
            found = list(threads.map(self._score, sequences))
        taught: dict[tuple[int, int], Sequence[float]] = {}
        for sequence, logprobs in zip(sequences, found, strict=True):
            first = sequence.spans[0].start
            for span in sequence.spans:
                learnt = trajectories[sequence.trajectory].turns[span.turn].learnt
                taught[sequence.trajectory, span.turn] = [logprobs[span.start - first + place] for place in learnt]
        return taught

    def close(self) -> None:
        self._http.close()

    def _score(self, sequence: TrainingSequence) -> list[float]:
        """Return the log-probabilities of the ids from the first span on."""
        start = sequence.spans[0].start
        body = {
            "input_ids": list(sequence.ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        answer = self._patiently("POST", "/generate", body)
        try:
            told = [(each[0], each[1]) for each in answer["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, TypeError, IndexError) as error:
            raise TeacherUnusable("the teacher's answer has no log-probabilities of its input") from error
        if [token for _, token in told] != list(sequence.ids[start:]):
            raise TeacherUnusable("the teacher scored other tokens than it was given")
        return [float(logprob) for logprob, _ in told]

    def _patiently(self, method: str, path: str, body: Any) -> Any:
        pause, began = _FIRST_PAUSE, time.monotonic()
        while True:
            try:
                answer = self._http.request(method, path, json=body)
                if answer.is_success:
                    return answer.json()
                said = f"{answer.status_code}: {answer.text[:200]}"
                # 408 and 429 say that the engine is busy; other 4xx would come again.
                if answer.status_code < 500 and answer.status_code not in {408, 429}:
                    raise TeacherUnusable(f"the teacher at {self._settings.url} refuses {method} {path}: {said}")
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
            except ValueError as error:
                raise TeacherUnusable(f"the teacher at {self._settings.url} does not answer JSON: {error}") from error
            if self.patience is not None and time.monotonic() - began >= self.patience:
                raise TeacherSilent(f"the teacher at {self._settings.url}: {said}")
            _log.warning("the teacher does not answer, trying again", request=f"{method} {path}", reason=said)
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def differing(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """Describe a token of ours that theirs lacks or has under another id; None if there is none."""
    for token, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if theirs.get(token) != number:
            return f"{token!r}, which is {number} here and {theirs.get(token, 'none')} there"
    return None


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the ids of all tokens by text, including added ones."""
    told = json.loads(file.read_text())
    vocabulary = told.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of unigram models: [token, score] in order
        vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
    return {**vocabulary, **{each["content"]: each["id"] for each in told.get("added_tokens", ())}}
