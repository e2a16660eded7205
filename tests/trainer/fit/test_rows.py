"""Rows of files become token trees by the run's own tokenizer and template, and only answers are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from proxy.contract.trajectory import Trajectory
from proxy.tokens.template import ChatTemplate
from tests.proxy.tokens.models import THINKING, write_model
from trainer.errors import ConfigurationError, NothingToFit
from trainer.fit.options import DPO, KTO, REWARD_MODEL, SFT
from trainer.fit.records import Example, Labelled, Pair
from trainer.fit.rendering import Renderer
from trainer.fit.rows import OfFiles, read_files

USER = {"role": "user", "content": "What is 17 + 25?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": '{"a": 17, "b": 25, "op": "+"}'}}
    ],
}
RESULT = {"role": "tool", "content": "42"}
ANSWER = {"role": "assistant", "content": "The answer is 42."}
WRONG = {"role": "assistant", "content": "No idea."}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rows") / "model")


def read(directory: Path, model: Path, kind: str, *rows: Any, context: int | None = 512) -> OfFiles:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_files(kind, [path], Renderer(model, context), 1000)


def learnt(template: ChatTemplate, side: Trajectory) -> list[str]:
    return [template.tokenizer.decode(list(turn.output_ids), skip_special_tokens=False) for turn in side.turns]


def path_of(side: Trajectory, last: int = -1) -> list[int]:
    """Return the ids of the path to a turn, including its output."""
    paths: list[list[int]] = []
    for turn in side.turns:
        before = [] if turn.parent is None else paths[turn.parent][: turn.prefix_tokens]
        paths.append([*before, *turn.prompt_ids, *turn.output_ids])
    return paths[last]


def test_a_conversation_is_rendered_as_the_proxy_renders_it(tmp_path: Path, model: Path) -> None:
    """Only answers are learnt, each with its end token; everything that the agent received is context."""
    messages: list[dict[str, Any]] = [USER, CALL, RESULT, ANSWER]
    (example,) = read(tmp_path, model, SFT, {"messages": messages, "tools": TOOLS}).items
    assert isinstance(example, Example)
    side, template = example.trajectory, ChatTemplate.load(str(model))
    call, answer = learnt(template, side)
    assert call.startswith("<tool_call>\n")
    assert call.endswith("</tool_call><|im_end|>")
    assert answer == "The answer is 42.<|im_end|>"
    assert [(turn.parent, turn.prefix_tokens > 0) for turn in side.turns] == [(None, False), (0, True)]
    for place, turn in zip((1, 3), (0, 1), strict=True):
        prompt = template.encode_prompt(template.render(messages[:place], TOOLS, generation_prompt=True))
        assert tuple(path_of(side, turn)[: len(prompt)]) == prompt
    as_json = read(tmp_path, model, SFT, {"messages": messages, "tools": json.dumps(TOOLS)}).items[0]
    assert path_of(as_json.trajectory) == path_of(side)


def test_a_template_that_rewrites_earlier_answers_gets_a_path_for_each(tmp_path: Path) -> None:
    model = write_model(tmp_path / "thinking", template=THINKING)
    thought = {"role": "assistant", "content": "<think>hm</think>Twelve."}
    (example,) = read(tmp_path, model, SFT, {"messages": [USER, thought, USER, ANSWER]}).items
    assert [turn.parent for turn in example.trajectory.turns] == [None, None]
    assert learnt(ChatTemplate.load(str(model)), example.trajectory)[1].endswith("The answer is 42.<|im_end|>")


def test_pairs_share_their_prompt(tmp_path: Path, model: Path) -> None:
    rows = (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        {"prompt": USER["content"], "chosen": [ANSWER], "rejected": [WRONG]},
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
    )
    template = ChatTemplate.load(str(model))
    found = read(tmp_path, model, DPO, *rows).items
    for pair in found:
        assert isinstance(pair, Pair)
        assert learnt(template, pair.chosen) == ["The answer is 42.<|im_end|>"]
        assert learnt(template, pair.rejected) == ["No idea.<|im_end|>"]
        assert pair.chosen.turns[0].prompt_ids == pair.rejected.turns[0].prompt_ids
    assert len({path for pair in found for path in (tuple(path_of(pair.chosen)),)}) == 1


def test_a_reward_model_scores_the_last_answer_alone(tmp_path: Path, model: Path) -> None:
    row = {"prompt": [USER], "chosen": [CALL, RESULT, ANSWER], "rejected": [WRONG], "tools": TOOLS}
    template = ChatTemplate.load(str(model))
    (pair,) = read(tmp_path, model, REWARD_MODEL, row).items
    assert learnt(template, pair.chosen) == ["The answer is 42.<|im_end|>"]
    (pair,) = read(tmp_path, model, DPO, row).items
    assert len(learnt(template, pair.chosen)) == 2


def test_plain_text_ends_with_the_end_of_the_text(tmp_path: Path, model: Path) -> None:
    rows = (
        {"prompt": "17 + 25 =", "completion": " 42", "label": True},
        {"prompt": "1", "completion": "2", "label": 0},
    )
    first, second = read(tmp_path, model, KTO, *rows).items
    assert isinstance(first, Labelled)
    assert (first.desirable, second.desirable) == (True, False)
    template = ChatTemplate.load(str(model))
    assert learnt(template, first.trajectory) == [" 42<|im_end|>"]
    assert tuple(first.trajectory.turns[0].prompt_ids) == template.encode("17 + 25 =")


def test_rows_that_cannot_be_learnt_are_counted_by_reason(tmp_path: Path, model: Path) -> None:
    rows = (
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {"role": "assistant", "content": "42 " * 600}]},
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWER]},
        {"prompt": "", "completion": "42"},
    )
    with structlog.testing.capture_logs() as logs:
        found = read(tmp_path, model, SFT, *rows)
    assert len(found.items) == 2
    assert found.dropped == {"too_long": 1, "no_answer": 1, "not_text": 1, "empty_prompt": 1}
    assert [line["row"] for line in logs] == [f"rows.jsonl, row {number}" for number in (2, 3, 4, 6)]
    assert "the model's context is 512" in logs[0]["why"]
    path = tmp_path / "rows.jsonl"
    assert read_files(SFT, [path], Renderer(model, None), 20).dropped["foreign_tokens"] > 0


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        (SFT, {"text": "x"}, "row 1: there is no column 'prompt'; fit sft reads messages, or prompt and completion"),
        (DPO, {"prompt": "x", "chosen": "y"}, "there is no column 'rejected'; .* this row has: chosen, prompt"),
        (KTO, {"prompt": "x", "completion": None, "label": True}, "there is nothing in column 'completion'"),
        (KTO, {"prompt": "x", "completion": "y", "label": "good"}, "label is true or false, not 'good'"),
        (SFT, {"messages": "hello"}, "messages is a text, or a list of messages"),
        (SFT, {"messages": [{"content": "x"}]}, "messages is a text, or a list of messages"),
        (SFT, {"messages": [USER, ANSWER], "tools": "{"}, "tools is not JSON"),
        (SFT, {"messages": [USER, ANSWER], "tools": 3}, "tools is a list of tools"),
        (DPO, {"prompt": "x", "chosen": [USER, ANSWER], "rejected": "y"}, "begins with .* role user; .*leave out"),
    ],
)
def test_columns_that_are_missing_or_wrong_are_named(
    tmp_path: Path, model: Path, kind: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(NothingToFit, match=said):
        read(tmp_path, model, kind, row)


def test_a_file_given_twice_is_learnt_once(tmp_path: Path, model: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        path.write_text(json.dumps({"messages": [USER, ANSWER]}))
    with pytest.raises(ConfigurationError, match=r"b.jsonl is the same as a file before it"):
        read_files(SFT, paths, Renderer(model, 512), 1000)


def test_files_are_named_by_their_digests(tmp_path: Path, model: Path) -> None:
    (file,) = read(tmp_path, model, SFT, {"messages": [USER, ANSWER]}, {"messages": [USER]}).files
    assert (file.name, file.rows, len(file.sha256)) == ("rows.jsonl", 2, 64)


def test_messages_need_a_template(tmp_path: Path) -> None:
    model = write_model(tmp_path / "bare", template=None)
    with pytest.raises(ConfigurationError, match="no chat template"):
        read(tmp_path, model, SFT, {"messages": [USER, ANSWER]})
