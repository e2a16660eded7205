"""Makes the checkpoint in `checkpoint/`: a tokenizer and a tiny Qwen3 that has seen calculators used well and badly.

    OMP_NUM_THREADS=1 python -m agents_examples.calculator.make_checkpoint

1. Byte-level BPE from rendered demonstrations (`vocabulary.py`).
2. A randomly initialised Qwen3 of about 360,000 parameters.
3. Warm start by next-token prediction on what the assistant says: 200 steps on right demonstrations, which teach it
   to copy operands and results, then 100 on a mediocre mixture, which buries that ability under bad habits
   (`demonstrations.py`). Reinforcement learning has to dig it out again.
4. The reward the model starts from, sampled and greedy, over 512 problems.

Weights are stored as bfloat16 to keep the file under 1 MB; the config says float32, the precision to compute in.
The same seed on the same machine and torch gives the same checkpoint. One core needs one to three minutes.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from agents_examples.calculator.demonstrations import ALL_RIGHT, MEDIOCRE, Message, Mixture, demonstrate
from agents_examples.calculator.sampling import measure
from agents_examples.calculator.vocabulary import empty_tokenizer, render, train_tokenizer

RIGHT_STEPS = 200
MEDIOCRE_STEPS = 100
WARM_UP_STEPS = 30
BATCH = 48
LEARNING_RATE = 3e-3
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of a conversation, and the same ids with all tokens that are not the assistant's replaced by
    IGNORED."""

    ids: list[int]
    labels: list[int]


def build_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    plain = empty_tokenizer()
    conversations = demonstrate(rng, MEDIOCRE, 1000)
    return train_tokenizer([render(plain, messages) for messages in conversations])


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Example:
    """Tokenise a conversation turn by turn, as a server does: a prompt, then the model's answer."""
    ids: list[int] = []
    labels: list[int] = []
    position = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], generation_prompt=True)
        said = render(tokenizer, messages[: index + 1]).removesuffix("\n")
        prompt_ids = tokenizer.encode(prompt[position:])
        said_ids = tokenizer.encode(said[len(prompt) :])
        ids += prompt_ids + said_ids
        labels += [IGNORED] * len(prompt_ids) + said_ids
        position = len(said)
    return Example(ids=ids, labels=labels)


def batch_of(examples: list[Example], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, both [examples, longest], padded on the right, which causal attention never sees."""
    width = max(len(example.ids) for example in examples)
    ids = [example.ids + [padding] * (width - len(example.ids)) for example in examples]
    labels = [example.labels + [IGNORED] * (width - len(example.labels)) for example in examples]
    return torch.tensor(ids), torch.tensor(labels)


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth. It ends low so that the last habits keep their shares."""
    progress = step / (RIGHT_STEPS + MEDIOCRE_STEPS)
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    stages: list[tuple[int, Mixture]] = [(RIGHT_STEPS, ALL_RIGHT), (MEDIOCRE_STEPS, MEDIOCRE)]
    steps = [mixture for count, mixture in stages for _ in range(count)]
    model.train()
    for step, mixture in enumerate(steps, start=1):
        examples = [encode(tokenizer, messages) for messages in demonstrate(rng, mixture, BATCH)]
        ids, labels = batch_of(examples, tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the calculator's checkpoint. Takes one to three minutes.")
    parser.add_argument("--seed", type=int, default=0, help="of demonstrations and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint", help="directory to write")
    arguments = parser.parse_args()
    started = time.monotonic()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    tokenizer = build_tokenizer(rng)
    model = build_model(tokenizer)
    conversation = encode(tokenizer, demonstrate(rng, ALL_RIGHT, 1)[0])
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(conversation.ids)} a conversation")
    warm_start(model, tokenizer, rng)
    stored = save(model, tokenizer, arguments.out)
    for temperature in (1.0, 0.0):
        result = measure(stored, tokenizer, temperature=temperature)
        print(
            f"temperature {temperature:.0f}: reward {result.mean_reward:.3f}, answers of {result.mean_length:.1f} "
            f"tokens, at most {result.longest}; most often {result.commonest!r}"
        )
    print(f"{arguments.out} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
