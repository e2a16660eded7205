"""Reading a model's directory: tokenizer, chat template, stop tokens and context length. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from proxy.settings import ConfigurationError

_WANTED = ("*.json", "*.jinja")
_TEXT_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
# Tokenizers without a bound have a huge `model_max_length`, such as 1e30.
_UNBOUNDED = 10**9


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model and the settings in them.

    `templates` are the chat templates by name ("default", "tool_use"). `special_tokens` are those that templates may
    name, such as `bos_token`. `stop_ids` and `stop_texts` are the tokens that end an answer by the model's
    configuration. `vocabulary_size` is that of the model's output layer, which may be padded beyond the tokenizer's;
    0 if the configuration does not state it.
    """

    directory: Path
    tokenizer_json: Path
    templates: dict[str, str]
    special_tokens: dict[str, str]
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    context_length: int
    vocabulary_size: int = 0


def locate(model: str, cache_dir: Path | None = None) -> Path:
    """Return the directory of `model`: a directory itself, or the snapshot of a Hugging Face id, from the local cache
    or else downloaded. Raise ConfigurationError if it is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    # Imported late: a model in a directory needs no Hugging Face client, which takes long to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        try:
            found = snapshot_download(model, allow_patterns=list(_WANTED), cache_dir=cache_dir, local_files_only=True)
        except LocalEntryNotFoundError:
            found = snapshot_download(model, allow_patterns=list(_WANTED), cache_dir=cache_dir)
    except HFValidationError as error:
        raise ConfigurationError(f"run.model: {model!r} is neither a directory nor a Hugging Face id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"run.model: {model!r} is not a directory, and downloading it failed: {error}"
        ) from error
    return Path(found)


def read_model_files(directory: Path) -> ModelFiles:
    """Read the files of a model. Raise ConfigurationError that names a missing or unreadable file or key."""
    tokenizer_json = directory / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise ConfigurationError(f"{directory} has no tokenizer.json: base-rl needs a fast tokenizer")
    config = _read_json(directory / "config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    special = _special_tokens(_read_json(directory / "special_tokens_map.json")) | _special_tokens(tokenizer_config)
    return ModelFiles(
        directory=directory,
        tokenizer_json=tokenizer_json,
        templates=_templates(directory, tokenizer_config),
        special_tokens=special,
        stop_ids=_stop_ids(_read_json(directory / "generation_config.json"), config),
        stop_texts=(special["eos_token"],) if "eos_token" in special else (),
        context_length=_context_length(directory, config, tokenizer_config),
        vocabulary_size=_vocabulary_size(config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return value


def _special_tokens(values: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TEXT_TOKENS:
        token = values.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    # As in transformers, template files take precedence over the tokenizer's configuration.
    templates: dict[str, str] = {}
    inline = tokenizer_config.get("chat_template") or _read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        templates = {entry["name"]: entry["template"] for entry in inline}
    named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    main = directory / "chat_template.jinja"
    if main.is_file():
        templates = {"default": main.read_text(encoding="utf-8")}
    templates |= {path.stem: path.read_text(encoding="utf-8") for path in named}
    if "default" not in templates:
        raise ConfigurationError(
            f"{directory} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "base-rl serves chat models; add the template that the model was trained with"
        )
    return templates


def _stop_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    for config in configs:
        eos = config.get("eos_token_id")
        if isinstance(eos, int):
            return (eos,)
        if isinstance(eos, list) and eos:
            return tuple(int(token) for token in eos)
    return ()


def _vocabulary_size(config: dict[str, Any]) -> int:
    text_config = config.get("text_config")
    sizes = [source.get("vocab_size") for source in (config, text_config) if isinstance(source, dict)]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _context_length(directory: Path, config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int:
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _CONTEXT_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    bound = tokenizer_config.get("model_max_length")
    if isinstance(bound, int | float) and 0 < bound < _UNBOUNDED:
        return int(bound)
    raise ConfigurationError(
        f"{directory}/config.json does not state the context length: add max_position_embeddings"
    )
