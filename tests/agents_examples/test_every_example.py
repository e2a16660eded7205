"""Test what every example promises: its files, its black box, its tiny model, and the figures of its README."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from agents_examples.tiny.checkpoint import Recipe
from agents_examples.tiny.vocabulary import chat_template
from benchmarks.examples.report import readme_rows
from benchmarks.examples.run import EXAMPLES, names
from proxy.settings import load_settings
from tests.docs.markdown import ROOT, code_blocks, rows
from trainer.config import load_runs

EACH = pytest.mark.parametrize("name", names())
MEASURED: dict[str, dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "examples.json").read_text())


@EACH
def test_the_model_is_tiny_and_has_the_shared_template(name: str) -> None:
    checkpoint = EXAMPLES / name / "checkpoint"
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 1_000_000
    assert (checkpoint / "chat_template.jinja").read_text() == chat_template()
    with safe_open(checkpoint / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(key).dtype for key in stored.keys()} == {torch.bfloat16}  # noqa: SIM118


@EACH
def test_equal_seeds_give_equal_demonstrations(name: str) -> None:
    recipe: Recipe = importlib.import_module(f"agents_examples.{name}.demonstrations").recipe()
    for stage in recipe.stages:
        assert stage.demonstrate(random.Random(1), 8) == stage.demonstrate(random.Random(1), 8)


@EACH
def test_the_agent_knows_no_more_than_an_address_and_a_key(name: str) -> None:
    source = (EXAMPLES / name / "agent.py").read_text()
    assert "base_rl" not in source
    assert len(source.splitlines()) <= 120


@EACH
def test_the_configuration_is_valid_and_named_like_the_example(name: str) -> None:
    file = EXAMPLES / name / "config.toml"
    assert load_settings(file).run.name == name
    assert load_runs(file, {}, {})


@EACH
def test_the_configuration_for_a_real_model_is_valid(name: str, tmp_path: Path) -> None:
    blocks = code_blocks((EXAMPLES / name / "README.md").read_text(), "toml")
    assert len(blocks) == 1
    file = tmp_path / "real.toml"
    file.write_text(blocks[0])
    assert load_settings(file).run.name == name
    assert load_runs(file, {}, {})


@EACH
def test_the_tasks_are_those_that_the_example_writes(name: str, tmp_path: Path) -> None:
    importlib.import_module(f"agents_examples.{name}.tasks").write_tasks(tmp_path / "tasks.jsonl")
    assert (EXAMPLES / name / "tasks.jsonl").read_text() == (tmp_path / "tasks.jsonl").read_text()


@EACH
def test_the_readme_has_the_measured_figures(name: str) -> None:
    page = (EXAMPLES / name / "README.md").read_text()
    measured = MEASURED[name]
    for row in readme_rows(measured):
        assert row in rows(page)
    assert f"measured on {measured['machine']['date']}" in " ".join(page.split())
    assert (ROOT / "docs" / "images" / f"example-{name}.svg").exists()
    assert f"(../../docs/images/example-{name}.svg)" in page
