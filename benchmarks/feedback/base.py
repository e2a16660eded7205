"""The model that the runs begin with: the demo's, warmed up to understand feedback in words.

The demo's own checkpoint has never seen a message that says what an answer should have been, so that its prediction
would not change with one. Half of the demonstrations of this one have a message of the teacher's prompt before the
first answer, which the demonstrated conversation follows, and "ok" before conversations of the mediocre mixture.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from agents_examples.calculator.demonstrations import (
    ALL_RIGHT,
    MEDIOCRE,
    Habit,
    Message,
    Mixture,
    conversation,
    demonstrate,
)
from agents_examples.calculator.make_checkpoint import IGNORED, batch_of, build_model, encode, save
from agents_examples.calculator.tasks import random_problem
from agents_examples.calculator.vocabulary import empty_tokenizer, render, train_tokenizer
from benchmarks.feedback.texts import PRAISE, SHOULD, SILENT
from proxy.settings import TextSettings

RIGHT_STEPS, MEDIOCRE_STEPS = 250, 120
_WARM_UP_STEPS = 30
_BATCH = 64
_LEARNING_RATE = 3e-3
# Shares of the demonstrations with a message that say nothing, that are about the question's own problem among the
# rest, and that say what should have been done instead of praising.
_SILENT, _OWN_PROBLEM, _SHOULD = 0.12, 0.5, 0.7


def make_base(directory: Path, *, seed: int, short: bool) -> None:
    """Make tokenizer and weights in `directory`. Takes two to three minutes of a core, or seconds if `short`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    plain = empty_tokenizer()
    tokenizer = train_tokenizer([render(plain, messages) for messages in _demonstrations(rng, MEDIOCRE, 1500)])
    model = build_model(tokenizer)
    steps = [ALL_RIGHT] * (6 if short else RIGHT_STEPS) + [MEDIOCRE] * (2 if short else MEDIOCRE_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)

    def factor(step: int) -> float:
        """Warm up linearly, then decay by a cosine to a fiftieth, so that the last habits keep their shares."""
        progress = step / len(steps)
        return min(1.0, (step + 1) / _WARM_UP_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for mixture in steps:
        examples = [encode(tokenizer, messages) for messages in _demonstrations(rng, mixture, _BATCH)]
        ids, labels = batch_of(examples, tokenizer.pad_token_id)
        logits: Any = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()  # type: ignore[no-untyped-call]
    save(model, tokenizer, directory)


def _demonstrations(rng: random.Random, mixture: Mixture, count: int) -> list[list[Message]]:
    """Return demonstrations, every second one with a message of feedback."""
    return demonstrate(rng, mixture, count // 2) + [_after_feedback(rng) for _ in range(count - count // 2)]


def _after_feedback(rng: random.Random) -> list[Message]:
    if rng.random() < _SILENT:
        question, *answers = demonstrate(rng, MEDIOCRE, 1)[0]
        return [question, _feedback(SILENT), *answers]
    problem = random_problem(rng)
    named = problem if rng.random() < _OWN_PROBLEM else random_problem(rng)
    text = (SHOULD if rng.random() < _SHOULD else PRAISE).format(named.expression)
    # The answer follows the text, even where that names another problem: the model learns to read it.
    _, *answers = conversation(named, Habit.RIGHT, rng)
    return [{"role": "user", "content": problem.question}, _feedback(text), *answers]


def _feedback(text: str) -> Message:
    settings = TextSettings()
    return {"role": settings.role, "content": settings.content([text])}
