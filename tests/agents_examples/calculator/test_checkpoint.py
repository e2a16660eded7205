from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from agents_examples.calculator import make_checkpoint
from agents_examples.calculator.demonstrations import (
    ALL_RIGHT,
    MEDIOCRE,
    Habit,
    conversation,
    demonstrate,
    with_tool,
)
from agents_examples.calculator.sampling import measure, read_answer
from agents_examples.calculator.tasks import CALCULATOR, Problem
from agents_examples.tiny import vocabulary
from agents_examples.tiny.checkpoint import IGNORED, encode
from agents_examples.tiny.vocabulary import chat_template

CHECKPOINT = Path(make_checkpoint.__file__).parent / "checkpoint"


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, generation_prompt: bool = False
) -> str:
    return vocabulary.render(tokenizer, messages, tools=[CALCULATOR], generation_prompt=generation_prompt)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(CHECKPOINT))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(CHECKPOINT)


def test_it_is_small_and_computes_in_float32(model: Qwen3ForCausalLM) -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 1_000_000
    assert 300_000 < model.num_parameters() < 400_000
    assert model.dtype is torch.float32
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_generation_ends_with_the_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"] == end
    assert json.loads((CHECKPOINT / "config.json").read_text())["eos_token_id"] == end
    assert tokenizer.eos_token_id == end


def test_its_template_is_the_one_in_the_source(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == chat_template()


def test_it_starts_with_a_low_but_nonzero_reward(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    sampled = measure(model, tokenizer, temperature=1.0, count=256)
    greedy = measure(model, tokenizer, temperature=0.0, count=128)
    assert 0.1 <= sampled.mean_reward <= 0.3
    assert sampled.longest < 64
    assert greedy.mean_reward <= 0.05
    assert re.fullmatch(r"The answer is #+\.", greedy.commonest)
    assert re.fullmatch(r"The answer is #+\.", sampled.commonest)


@given(st.integers(0, 99), st.integers(0, 99), st.sampled_from("+-*"))
def test_a_generated_call_is_the_text_that_the_template_renders(
    tokenizer: PreTrainedTokenizerFast, a: int, b: int, op: str
) -> None:
    generated = (
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"a": {a}, "b": {b}, "op": "{op}"}}}}\n</tool_call>'
    )
    question: dict[str, Any] = {"role": "user", "content": "Hm?"}
    prompt = render(tokenizer, [question], generation_prompt=True)
    rendered = render(tokenizer, [question, read_answer(generated)])
    assert rendered == prompt + generated + "<|im_end|>\n"
    apart = tokenizer.encode(prompt) + tokenizer.encode(generated) + [tokenizer.eos_token_id] + tokenizer.encode("\n")
    assert tokenizer.encode(rendered) == apart
    assert tokenizer.decode(apart) == rendered


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [token for token in tokenizer.get_vocab() if len(token) > 1 and re.search(r"\d", token)] == []
    assert len(tokenizer.encode("1234567890")) == 10


@pytest.mark.parametrize("empty", [{"content": None}, {"content": ""}, {}])
def test_an_assistant_without_content(tokenizer: PreTrainedTokenizerFast, empty: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"a": 1}'}}
    text = render(tokenizer, [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]} | empty])
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    )


def test_tools_are_rendered_as_they_were_sent(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render(tokenizer, [{"role": "user", "content": "Hi"}])
    assert json.dumps(CALCULATOR) in text
    assert len(tokenizer.encode(text)) < 25


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "Hi"}], "<|im_start|>user\nHi<|im_end|>\n"),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
        ),
        (
            [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}],
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n",
        ),
    ],
)
def test_the_template_without_tools(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], text: str
) -> None:
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text


@pytest.mark.parametrize("habit", list(Habit))
def test_examples_train_the_assistants_messages(tokenizer: PreTrainedTokenizerFast, habit: Habit) -> None:
    messages = conversation(Problem(a=12, op="*", b=7), habit, random.Random(0))
    example = encode(tokenizer, with_tool(messages))
    said = tokenizer.decode([label for label in example.labels if label != IGNORED])
    assert f"{tokenizer.decode(example.ids)}\n" == render(tokenizer, messages)
    assert said.count("<|im_end|>") == sum(message["role"] == "assistant" for message in messages)
    assert "12" not in said or "<tool_call>" in said
    assert "tool_response" not in said


def test_mixtures_keep_their_shares() -> None:
    conversations = demonstrate(random.Random(0), MEDIOCRE, 100)
    without_tool = sum(len(messages) == 2 for messages in conversations)
    assert without_tool == pytest.approx(100 * (MEDIOCRE[Habit.GUESS] + MEDIOCRE[Habit.BROKEN_CALL]), abs=2)
    assert sum(MEDIOCRE.values()) == pytest.approx(1.0)
    assert {len(messages) for messages in demonstrate(random.Random(0), ALL_RIGHT, 20)} == {4}
