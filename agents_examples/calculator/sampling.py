"""Batched sampling from a small model, and the reward that it earns: how the checkpoint's starting point is measured.

A stand-in for the server in one process: the same template, the same reading of tool calls, the same marking.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agents_examples.calculator.tasks import Problem, calculate, random_problem, score
from agents_examples.calculator.vocabulary import render

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Over one attempt per problem. Lengths are in tokens and of single answers."""

    mean_reward: float
    mean_length: float
    longest: int
    commonest: str
    """The most frequent first answer, every digit replaced by `#`."""


@torch.inference_mode()
def sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], *, temperature: float, longest: int, stop: int, padding: int
) -> list[list[int]]:
    """One completion per prompt, `stop` left out; greedy at temperature 0. Prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    done = torch.zeros(len(prompts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    for _ in range(longest):
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
        drawn = drawn.masked_fill(done, stop)
        columns.append(drawn)
        done |= drawn == stop
        if done.all():
            break
        ids = drawn[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    rows = torch.stack(columns, dim=1).tolist()
    return [row[: row.index(stop)] if stop in row else row for row in rows]


def read_answer(text: str) -> dict[str, Any]:
    """An assistant message: a valid tool call if there is one, else the text as it stands."""
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
    """Lets the model attempt `count` random problems with the calculator."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    attempts = [_Attempt(random_problem(rng)) for _ in range(count)]
    stop, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    lengths: list[int] = []
    first_answers: dict[str, int] = {}
    for turn in range(max_turns):
        open_attempts = [attempt for attempt in attempts if attempt.answer is None]
        if not open_attempts:
            break
        prompts = [
            tokenizer.encode(render(tokenizer, attempt.messages, generation_prompt=True)) for attempt in open_attempts
        ]
        completions = sample(model, prompts, temperature=temperature, longest=longest, stop=stop, padding=padding)
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


class _Attempt:
    """A conversation in progress; `answer` is set when the model answers without a tool."""

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
