"""Make a tiny Qwen3 that has seen a task done well and badly, so that reinforcement learning has something to find.

1. Byte-level BPE from rendered demonstrations (`vocabulary.py`).
2. A randomly initialised Qwen3 of about 360,000 parameters.
3. Warm start by next-token prediction on what the assistant says: first on right demonstrations, which teach what the
   task takes, then on a mediocre mixture, which buries that ability under bad habits.

Weights are stored as bfloat16 to keep the file under 1 MB; the config says float32, the precision to compute in. The
same seed on the same machine and torch gives the same checkpoint. One core needs one to three minutes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from agents_examples.tiny.habits import Habit, draw_habits
from agents_examples.tiny.vocabulary import LARGEST_VOCABULARY, empty_tokenizer, render, train_tokenizer

LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
IGNORED = -100
"""The label of tokens that are not the assistant's: `cross_entropy` leaves them out."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages and tool descriptions in the form of the chat completions API. `taught` has the indices of the
    assistant messages that the warm start learns; None: all of them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    taught: frozenset[int] | None = None


Demonstrate = Callable[[random.Random, int], list[Conversation]]
"""Return that many demonstrations."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the warm start: `steps` batches of demonstrations of one kind."""

    steps: int
    demonstrate: Demonstrate


def stage_of_habits(
    mixture: Mapping[Habit, float], steps: int, demonstration: Callable[[Habit, random.Random], Conversation]
) -> Stage:
    """Return a stage in which the number of every habit follows its share of the mixture to within one.
    `demonstration` makes a conversation of a habit."""
    return Stage(
        steps=steps,
        demonstrate=lambda rng, count: [demonstration(habit, rng) for habit in draw_habits(rng, mixture, count)],
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a checkpoint is made of. The tokenizer learns its merges from demonstrations of the last stage; each of
    `words` is a token of its own."""

    stages: Sequence[Stage]
    batch: int = 48
    tokenizer_conversations: int = 1000
    largest_vocabulary: int = LARGEST_VOCABULARY
    words: Sequence[str] = ()
    positions: int = 2048


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a conversation, and the same ids with all tokens that are not the assistant's replaced by
    IGNORED."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def make_checkpoint(recipe: Recipe, directory: Path, *, seed: int) -> Qwen3ForCausalLM:
    """Write tokenizer and weights to `directory`, printing the progress, and return the model as it was stored."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    plain = empty_tokenizer()
    corpus = recipe.stages[-1].demonstrate(rng, recipe.tokenizer_conversations)
    rendered = (render(plain, one.messages, tools=one.tools) for one in corpus)
    tokenizer = train_tokenizer(rendered, largest_vocabulary=recipe.largest_vocabulary, words=recipe.words)
    model = build_model(tokenizer, positions=recipe.positions)
    tokens = len(encode(tokenizer, recipe.stages[0].demonstrate(rng, 1)[0]).ids)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {tokens} a conversation")
    warm_start(model, tokenizer, recipe, rng)
    return save(model, tokenizer, directory)


def build_model(tokenizer: PreTrainedTokenizerFast, *, positions: int = 2048) -> Qwen3ForCausalLM:
    """Return a randomly initialised model for conversations of up to `positions` tokens."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=256,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Example:
    """Tokenise a conversation turn by turn, as a server does: a prompt, then the model's answer."""
    ids: list[int] = []
    labels: list[int] = []
    position = 0
    messages, tools = conversation.messages, conversation.tools
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], tools=tools, generation_prompt=True)
        said = render(tokenizer, messages[: index + 1], tools=tools).removesuffix("\n")
        prompt_ids = tokenizer.encode(prompt[position:])
        said_ids = tokenizer.encode(said[len(prompt) :])
        taught = conversation.taught is None or index in conversation.taught
        ids += prompt_ids + said_ids
        labels += [IGNORED] * len(prompt_ids) + (said_ids if taught else [IGNORED] * len(said_ids))
        position = len(said)
    return Example(ids=ids, labels=labels)


def batch_of(examples: Sequence[Example], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, both [examples, longest], padded on the right, which causal attention never sees."""
    width = max(len(example.ids) for example in examples)
    ids = [example.ids + [padding] * (width - len(example.ids)) for example in examples]
    labels = [example.labels + [IGNORED] * (width - len(example.labels)) for example in examples]
    return torch.tensor(ids), torch.tensor(labels)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth. It ends low so that the last habits keep their shares."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: random.Random
) -> None:
    """Train the model on the recipe's stages in order, in place."""
    steps = [stage for stage in recipe.stages for _ in range(stage.steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, len(steps)))
    model.train()
    for step, stage in enumerate(steps, start=1):
        examples = [encode(tokenizer, one) for one in stage.demonstrate(rng, recipe.batch)]
        ids, labels = batch_of(examples, tokenizer.pad_token_id)
        logits: Any = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}/{len(steps)}: loss {loss.item():.4f}", flush=True)
    model.eval()  # type: ignore[no-untyped-call]


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Qwen3ForCausalLM:
    """Write the checkpoint and read it back, so that the stored weights are measured afterwards."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    tied = set(model.all_tied_weights_keys)
    weights: dict[str, Any] = {
        name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name not in tied
    }
    model.save_pretrained(directory, state_dict=weights)
    tokenizer.save_pretrained(directory)
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
