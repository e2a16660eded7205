"""Batched sampling from a small model and its reward, to measure the checkpoint's starting point.

It imitates the server in one process: the same template, the same parsing of tool calls, the same scoring.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agents_examples.calculator.tasks import CALCULATOR, Problem, calculate, random_problem, score
from agents_examples.tiny.vocabulary import render

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Figures over one attempt per problem. Lengths are in tokens, per answer."""

    mean_reward: float
    mean_length: float
    longest: int
    commonest: str
    """The most frequent first answer, with every digit replaced by `#`."""


class Completion(NamedTuple):
    """The sampled ids, including the one that ended them, and their log-probabilities at the temperature of sampling
    (greedy ones: at 1)."""

    ids: list[int]
    logprobs: list[float]

    def without(self, stop: int | None) -> list[int]:
        """Return the ids before the one that ended them."""
        return self.ids[:-1] if self.ids[-1] == stop else self.ids


@torch.inference_mode()
def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    temperature: float,
    longest: int,
    stop: int | None,
    padding: int,
    generator: torch.Generator | None = None,
) -> list[Completion]:
    """Sample one completion per prompt, until a `stop` token or `longest` tokens; greedily at temperature 0. Prompts
    are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for _ in range(longest):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        scaled = (logits / (temperature or 1.0)).log_softmax(-1)
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial(scaled.exp(), 1, generator=generator)[:, 0]
        if stop is not None:
            drawn = drawn.masked_fill(done, stop)
        columns.append(drawn)
        logprobs.append(scaled.gather(-1, drawn[:, None])[:, 0])
        if stop is not None:
            done |= drawn == stop
        if done.all():
            break
        ids = drawn[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    completions = []
    for ids, own in zip(torch.stack(columns, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist(), strict=True):
        length = ids.index(stop) + 1 if stop in ids else len(ids)
        completions.append(Completion(ids[:length], own[:length]))
    return completions


def read_answer(text: str) -> dict[str, Any]:
    """Parse an answer as an assistant message: its tool call if there is a valid one, else its text."""
    found = _CALL.search(text)
    try:
        call = json.loads(found.group(1)) if found else None
    except ValueError:
        call = None
    if not (isinstance(call, dict) and isinstance(call.get("arguments"), dict) and isinstance(call.get("name"), str)):
        return {"role": "assistant", "content": text}
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    temperature: float,
    count: int = 512,
    seed: int = 12345,
    max_turns: int = 3,
    longest: int = 64,
) -> Measurement:
    """Let the model attempt `count` random problems with the calculator, and return the figures."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    attempts = [Attempt(random_problem(rng)) for _ in range(count)]
    stop, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    lengths: list[int] = []
    first_answers: dict[str, int] = {}
    for turn in range(max_turns):
        open_attempts = [attempt for attempt in attempts if attempt.answer is None]
        if not open_attempts:
            break
        prompts = [
            tokenizer.encode(render(tokenizer, attempt.messages, tools=[CALCULATOR], generation_prompt=True))
            for attempt in open_attempts
        ]
        completions = [
            completion.without(stop)
            for completion in sample(
                model, prompts, temperature=temperature, longest=longest, stop=stop, padding=padding
            )
        ]
        lengths += map(len, completions)
        for attempt, completion in zip(open_attempts, completions, strict=True):
            text = str(tokenizer.decode(completion))
            if turn == 0:
                shape = re.sub(r"\d", "#", text)
                first_answers[shape] = first_answers.get(shape, 0) + 1
            attempt.receive(read_answer(text))
    return Measurement(
        mean_reward=sum(score(attempt.problem, attempt.answer or "") for attempt in attempts) / count,
        mean_length=sum(lengths) / len(lengths),
        longest=max(lengths),
        commonest=max(first_answers, key=lambda shape: first_answers[shape]),
    )


class Attempt:
    """A conversation in progress. `answer` is set once the model answers without a tool."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": problem.question}]
        self.answer: str | None = None

    def receive(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if "tool_calls" not in message:
            self.answer = message["content"]
            return
        function = message["tool_calls"][0]["function"]
        known = function["name"] == "calculator"
        result = calculate(function["arguments"]) if known else "error: the only tool is calculator"
        self.messages.append({"role": "tool", "tool_call_id": "call_0", "content": result})
