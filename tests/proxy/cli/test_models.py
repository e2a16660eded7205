"""Resolution of a model's name or path to a directory: every error says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.cli.models import ModelNotUsable, resolve_model


def a_model(directory: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directory / name).write_bytes(b"")
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    model = a_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == resolve_model("./model") == resolve_model(str(model)) == model


@pytest.mark.parametrize("name", ["./none", "/no/such/place", "~/no-such-model", "a/b/c"])
def test_a_path_that_is_not_a_directory_is_not_searched_elsewhere(name: str) -> None:
    with pytest.raises(ModelNotUsable, match="is not a directory: name one"):
        resolve_model(name)


def test_no_model_at_all() -> None:
    with pytest.raises(ModelNotUsable, match="--model"):
        resolve_model("")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_packages_are_named(tmp_path: Path, missing: str) -> None:
    (a_model(tmp_path) / missing).unlink()
    with pytest.raises(ModelNotUsable, match=missing.removeprefix("model") + ".*save_pretrained"):
        resolve_model(str(tmp_path))


def test_without_a_network_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub.\nmore than one line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        ModelNotUsable, match=r"\(no route to the hub\)\. Download it where there is a network"
    ) as refused:
        resolve_model("someone/some-model")
    assert "\n" not in str(refused.value)
