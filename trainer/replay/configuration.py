"""The configuration that a step was made with, as this trainer reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from proxy.contract.replay import StepBatch
from trainer.algorithm.parts import Algorithm, from_json
from trainer.config import Packing, TrainerSettings
from trainer.errors import ConfigurationError, ReplayImpossible
from trainer.replay.plan import inputs_of
from trainer.user_code import UserFunction

# How batches were packed before there was an option for it.
_DEFAULTS_THEN = {"packing": Packing.PACKED.value}


def recorded_configuration(
    step: StepBatch, functions: Mapping[str, UserFunction]
) -> tuple[TrainerSettings, Algorithm]:
    """Return the settings and the algorithm that a step was made with. `functions` are the user's own functions that
    the configuration of this machine names, by algorithm part.

    Raises ReplayImpossible if this version of the trainer does not know the configuration, or if a function is not
    named here or differs.
    """
    inputs = inputs_of(step)
    config = {**inputs.config, "batch": {**_DEFAULTS_THEN, **inputs.config.get("batch", {})}}
    if not torch.cuda.is_available():
        config["offload"] = False  # offloading moves tensors and changes no result; without a GPU it is not possible
    try:
        settings, algorithm = TrainerSettings.model_validate(config), from_json(inputs.algorithm)
    except (ValidationError, ConfigurationError) as error:
        raise ReplayImpossible(
            f"version {step.version} was made with a configuration that this trainer does not know; use version"
            f" {inputs.conditions.trainer} of base-rl: {error}"
        ) from error
    return settings, _with_local_functions(step, algorithm, functions)


def _with_local_functions(step: StepBatch, algorithm: Algorithm, here: Mapping[str, UserFunction]) -> Algorithm:
    """Return the algorithm with the paths that the user's own functions have on this machine."""
    found: dict[str, Any] = {}
    for part, then in algorithm.user_functions.items():
        now = here.get(part)
        made_with = (
            f"version {step.version} was made with algorithm.{part} = {Path(then.file).name}:{then.name}, a file of"
            f" SHA-256 {then.sha256}"
        )
        if now is None:
            raise ReplayImpossible(
                f"{made_with}; the configuration here names none: pass the configuration that does by --config"
            )
        if now.sha256 != then.sha256:
            raise ReplayImpossible(
                f"{made_with}; {now.file} differs, its SHA-256 is {now.sha256}: put the file back as it was"
            )
        found[part] = dataclasses.replace(then, file=now.file)
    return dataclasses.replace(algorithm, **found)
