"""Adapters with random weights, committed as versions of a run, and what each of them really answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.pool.installation import CHECKPOINT, END_TOKEN
from proxy.contract.claim import CommitRequest, StepReport
from proxy.contract.lora import merged_weights
from proxy.contract.policy import Probe, WeightsFormat, WeightsReference
from proxy.contract.step import Fit, StepConditions, StepInputs
from trainer.models.state_dict import digest, read_weights
from trainer.publish.adapters import save_adapter
from trainer.publish.checksums import checksums
from trainer.publish.probe import probe_ids

RANK, ALPHA = 4, 8
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 0.05
"""Standard deviation of an adapter's numbers: log-probabilities of two adapters differ by some tenths of a nat,
and answers stay varied."""
NEVER_ENDS = {END_TOKEN: -100}
"""The logit bias by which an answer has as many tokens as it may have."""
_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": list(LAYERS),
}


class Versions:
    """Adapter `n` is the version `n` of the run. Version 0 is the base model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = read_weights(CHECKPOINT)
        network: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        self._network = network.eval()
        self._loaded = 0

    def write(self, version: int) -> CommitRequest:
        """Write the adapter's files, and return the commit that makes it a version."""
        directory = self._folder / f"adapter-{version:04}"
        directory.mkdir(parents=True)
        save_adapter(self._tensors(version), _CONFIG, str(CHECKPOINT), directory)
        sha256, size = digest(directory)
        weights = WeightsReference(
            uri=str(directory.resolve()),
            format=WeightsFormat.ADAPTER,
            sha256=sha256,
            bytes=size,
            files=checksums(directory, {}),
        )
        ids = probe_ids(self._network.config.vocab_size)
        logprobs = self.logprobs(version, list(ids), len(ids) - 1, biased=False)
        probe = Probe(ids=ids, logprobs=tuple(min(0.0, each) for each in logprobs))
        return CommitRequest(
            claim_ids=(), parent_version=version - 1, weights=weights, step=step_report(), probe=probe
        )

    def logprobs(self, version: int, ids: list[int], count: int, *, biased: bool = True) -> list[float]:
        """Return the log-probabilities of the last `count` ids under a version, at temperature 1."""
        if version != self._loaded:
            self._network.load_state_dict(self._weights(version), strict=False)
            self._loaded = version
        with torch.no_grad():
            logits = self._network(input_ids=torch.tensor([ids])).logits[0].float()
        if biased:
            logits[:, int(END_TOKEN)] += NEVER_ENDS[END_TOKEN]
        rows = logits.log_softmax(-1)[-count - 1 : -1]
        values: list[float] = rows.gather(1, torch.tensor(ids[-count:])[:, None])[:, 0].tolist()
        return values

    def _weights(self, version: int) -> dict[str, Any]:
        if version == 0:
            return dict(self._base)
        return merged_weights(self._base, self._tensors(version), {"r": RANK, "lora_alpha": ALPHA})

    def _tensors(self, version: int) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors, which depend on the version's number alone."""
        numbers = torch.Generator().manual_seed(version)
        tensors = {}
        for name, weight in sorted(self._base.items()):
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in LAYERS:
                for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                    tensors[f"base_model.model.{layer}.lora_{part}.weight"] = SIZE * torch.randn(
                        shape, generator=numbers
                    )
        return tensors


def step_report() -> StepReport:
    """Return the report of a step that consumed nothing."""
    conditions = StepConditions(
        trainer="bench",
        torch=str(torch.__version__),
        transformers="",
        python="",
        machine="",
        device="cpu",
        device_name="",
        threads=1,
        ranks=1,
    )
    fit = Fit(kind="sft", options={}, sessions=(), epochs=1, steps=1)
    inputs = StepInputs(
        config={},
        algorithm={},
        conditions=conditions,
        trained_claim=None,
        optimizer_steps=0,
        fresh_optimizer=True,
        fit=fit,
    )
    return StepReport(config_hash="bench", seed=0, metrics={}, audit=(), inputs=inputs)
