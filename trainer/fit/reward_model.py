"""A reward model: the policy's body with a head that scores an answer at its last token, as transformers' sequence
classifiers do.

Axes: B rows, T tokens, S scored places, D hidden.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxy.contract.policy import Head
from trainer.config import Precision
from trainer.errors import UnsupportedModel, WeightsUnusable
from trainer.models.dropout import Repeatable, remove_dropout
from trainer.models.state_dict import adapter_in
from trainer.publish.checksums import verify_version

_TOLERANCE = 1e-3
_NOT_OF_THE_MODEL = {"config.json", "generation_config.json"}
_COMPANIONS = {".json", ".jinja", ".txt", ".model", ".tiktoken"}


class RewardModel(Repeatable):
    """A classifier of one label whose sequences may be packed into rows."""

    def __init__(self, classifier: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.classifier = classifier
        self.precision = precision

    @property
    def vocabulary(self) -> int:
        return int(cast("Any", self.classifier).get_input_embeddings().weight.shape[0])

    def forward(self, input_ids_BT: Tensor, position_ids_BT: Tensor, places_S: Tensor) -> Tensor:
        """Return S scores, float32. `places_S` are indices into the flattened rows. Positions separate the sequences
        of a row."""
        classifier = cast("Any", self.classifier)
        with torch.autocast(input_ids_BT.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            hidden_BTD = classifier.base_model(
                input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False
            ).last_hidden_state
        # Not in bfloat16: it cannot represent the small differences between the scores of a pair.
        scores: Tensor = classifier.score(hidden_BTD.flatten(0, 1)[places_S].float())[:, 0]
        return scores


def load_reward_model(
    head: Head, base: Path, precision: Precision, seed: int, root: Path | None = None
) -> RewardModel:
    """Load the head's weights on the CPU, with a new scoring head. Raises UnsupportedModel, and WeightsUnusable for
    files that are not the version's or lie outside of `root`."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    directory = base
    if head.weights is not None:
        directory = verify_version(head, root)
        if adapter_in(directory) is not None:
            raise WeightsUnusable(
                f"version {head.version} is an adapter, and a reward model begins from whole weights: publish one"
                " with trainer.adapter.publish = merged first"
            )
    cast("Any", logging).disable_progress_bar()
    verbosity = logging.get_verbosity()
    cast(
        "Any", logging
    ).set_verbosity_error()  # transformers would warn that the scoring head is new, which is intended
    torch.manual_seed(seed)
    try:
        classifier: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, num_labels=1, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    finally:
        cast("Any", logging).set_verbosity(verbosity)
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise UnsupportedModel(f"{type(classifier).__name__}: it has no scoring head of the usual kind, `score`")
    if classifier.config.pad_token_id is None:  # transformers refuses to score batches without a padding token
        end = classifier.config.eos_token_id
        classifier.config.pad_token_id = end[0] if isinstance(end, list) else end if end is not None else 0
    remove_dropout(classifier)
    model = RewardModel(classifier, Precision.FLOAT32)
    _check(model)
    model.precision = precision
    return model.train()


def save_reward_model(model: RewardModel, base: Path, output: Path, about: dict[str, Any]) -> None:
    """Write a directory that `AutoModelForSequenceClassification` reads, with the tokenizer; it appears complete or
    not at all. `base_rl.json` in it describes the fit."""
    hidden = output.parent / f".{output.name}-{secrets.token_hex(4)}"
    hidden.mkdir(parents=True)
    try:
        cast("Any", model.classifier).save_pretrained(hidden)
        for source in sorted(base.iterdir()):
            if source.suffix not in _COMPANIONS or source.name.endswith(".index.json") or not source.is_file():
                continue
            if source.name not in _NOT_OF_THE_MODEL:
                shutil.copyfile(source, hidden / source.name)
        (hidden / "base_rl.json").write_text(json.dumps(about, indent=2) + "\n")
        if output.is_dir():
            output.rmdir()
        os.replace(hidden, output)  # noqa: PTH105 - so that it is the system's rename, which is whole
    except OSError as error:
        raise WeightsUnusable(f"cannot write {output}: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _check(model: RewardModel) -> None:
    """Raise UnsupportedModel unless packed sequences get the scores that transformers gives to single ones."""
    classifier = cast("Any", model.classifier).eval()
    pad = classifier.config.pad_token_id
    ids = [index for index in range(20) if index != pad][:13]
    first_T, second_T = torch.tensor(ids[:7]) % model.vocabulary, torch.tensor(ids[7:]) % model.vocabulary
    with torch.no_grad():
        wanted = torch.cat(
            [classifier(input_ids=each[None], use_cache=False).logits[0] for each in (first_T, second_T)]
        )
        positions = torch.cat([torch.arange(len(first_T)), torch.arange(len(second_T))])
        found = model(torch.cat([first_T, second_T])[None], positions[None], torch.tensor([6, 12]))
    gap = (found - wanted).abs().max().item()
    if not gap <= _TOLERANCE:
        raise UnsupportedModel(
            f"{type(classifier).__name__}: packed sequences have other scores than single ones (by {gap:.3g})"
        )
