"""Resolves the name of a model to a directory that proxy, engine and trainer read."""

from __future__ import annotations

from pathlib import Path

_NEEDED = ("config.json", "tokenizer.json")
_PATTERNS_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]
_PATTERNS = [*_PATTERNS_WITHOUT_WEIGHTS, "*.safetensors"]


class ModelNotUsable(Exception):
    """The model cannot be found or read. The message says what to do."""


def resolve_model(name: str, *, weights: bool = True) -> Path:
    """Return a model's directory: `name` itself, or the cached or downloaded snapshot of a Hugging Face id.

    Without `weights`, tokeniser and chat template are enough.

    Raises ModelNotUsable.
    """
    if not name:
        raise ModelNotUsable("no model: name a directory or a Hugging Face id with --model or [run] model")
    directory = Path(name).expanduser()
    if directory.is_dir():
        return _checked(directory.resolve(), weights=weights)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotUsable(
            f"{name} is not a directory: name one that holds a Hugging Face model, "
            "or a Hugging Face id such as Qwen/Qwen3-0.6B"
        )
    return _checked(_download(name, weights=weights), weights=weights)


def _download(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS if weights else _PATTERNS_WITHOUT_WEIGHTS))
    except RepositoryNotFoundError as error:
        raise ModelNotUsable(
            f"{name} is neither a directory here nor a model on Hugging Face (private ones need `hf auth login`)"
        ) from error
    except HFValidationError as error:
        raise ModelNotUsable(f"{name} is neither a directory here nor a Hugging Face id") from error
    except (HfHubHTTPError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise ModelNotUsable(
            f"{name} is not a directory here, and could not be downloaded from Hugging Face ({reason}). "
            "Download it where there is a network, and pass its directory"
        ) from error


def _checked(directory: Path, *, weights: bool) -> Path:
    missing = [name for name in _NEEDED if not (directory / name).is_file()]
    if missing:
        raise ModelNotUsable(
            f"{directory} is no Hugging Face model with a fast tokenizer: {', '.join(missing)} missing; "
            "save model and tokenizer there with `save_pretrained`"
        )
    if weights and not any(directory.glob("*.safetensors")):
        raise ModelNotUsable(f"{directory} holds no *.safetensors: save the model with `save_pretrained`")
    return directory
