"""Test that a tiny checkpoint can be made again, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agents_examples.countdown.demonstrations import recipe
from agents_examples.tiny.checkpoint import make_checkpoint


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    short = replace(recipe(right_steps=2, mediocre_steps=1), batch=4, tokenizer_conversations=40)
    for place, seed in (("one", 7), ("two", 7), ("other", 8)):
        make_checkpoint(short, tmp_path / place, seed=seed)
    contents = {
        place: {file.name: file.read_bytes() for file in (tmp_path / place).iterdir()}
        for place in ("one", "two", "other")
    }
    assert contents["one"] == contents["two"]
    assert contents["one"]["model.safetensors"] != contents["other"]["model.safetensors"]
