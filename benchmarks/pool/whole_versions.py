"""Versions of whole weights, and what each of them really answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.pool.installation import CHECKPOINT, END_TOKEN
from benchmarks.pool.versions import NEVER_ENDS, step_report
from proxy.contract.claim import CommitRequest
from proxy.contract.policy import Probe, WeightsFormat, WeightsReference
from trainer.models.state_dict import digest, read_weights, save_weights
from trainer.publish.checksums import checksums
from trainer.publish.probe import probe_ids

SETS = 16
"""Different weights: version n has set n % SETS, so neighbours differ, and a thousand versions need little space."""
_NOISE = 0.1
"""Standard deviation of the noise, relative to that of each tensor: log-probabilities differ by tenths of a nat."""

Tensors = dict[str, torch.Tensor]


class WholeVersions:
    """Writes versions below `folder`. Version 0 is the base model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = read_weights(CHECKPOINT)
        self._networks = [self._network(number) for number in range(SETS)]
        base: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        self._base_network = base.eval()
        self._written = 0
        self._sets = [self._write_set(number) for number in range(SETS)]
        self.set_of: dict[int, int] = {}
        """The number of the weights of each committed version."""

    def commit(
        self,
        parent: int,
        *,
        weights: int,
        spoil: Callable[[Path], None] | None = None,
        probe_of: int | None = None,
    ) -> CommitRequest:
        """Write the directory of a version with one of the sets, and return its commit. `spoil` changes the files
        before their checksums are taken; `probe_of` names the set whose probe is sent."""
        self._written += 1
        directory = self._folder / f"whole-{self._written:05}"
        directory.mkdir(parents=True)
        for file in self._sets[weights % SETS].iterdir():
            if spoil is None:
                os.link(file, directory / file.name)
            else:
                (directory / file.name).write_bytes(file.read_bytes())
        if spoil is not None:
            spoil(directory)
        sha256, size = digest(directory)
        adapter = (directory / "adapter_config.json").exists()
        reference = WeightsReference(
            uri=str(directory.resolve()),
            format=WeightsFormat.ADAPTER if adapter else WeightsFormat.HUGGINGFACE,
            sha256=sha256,
            bytes=size,
            files=checksums(directory, {}),
        )
        probe = self._probe(weights if probe_of is None else probe_of)
        return CommitRequest(claim_ids=(), parent_version=parent, weights=reference, step=step_report(), probe=probe)

    def logprobs(
        self, prompt: Sequence[int], output: Sequence[int], spans: Sequence[tuple[int, int, int]]
    ) -> list[float]:
        """Return the log-probabilities of an answer at temperature 1, computed as an engine should: the prompt by the
        version of the first token, and the tokens of each span by its version, over the keys and values of those
        before."""
        cache = DynamicCache(config=self._base_network.config)
        found: list[float] = []
        for version, start, end in spans:
            ids = [*prompt, *output[: end - 1]] if start == 0 else list(output[start - 1 : end - 1])
            with torch.no_grad():
                logits = self._of(version)(
                    input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True
                ).logits[0]
            rows = logits[-(end - start) :].float()
            rows[:, int(END_TOKEN)] += NEVER_ENDS[END_TOKEN]
            targets = torch.tensor(output[start:end])
            found += rows.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        return found

    def set_number(self, weights: int) -> int:
        """Return the number of the set that `commit` uses for `weights`."""
        return weights % SETS

    def _of(self, version: int) -> Any:
        return self._networks[self.set_of[version]] if version in self.set_of else self._base_network

    def _probe(self, number: int) -> Probe:
        network = self._networks[number % SETS]
        ids = probe_ids(network.config.vocab_size)
        with torch.no_grad():
            rows = network(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]
        values = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].clamp(max=0.0).tolist()
        return Probe(ids=ids, logprobs=tuple(values))

    def _network(self, number: int) -> Any:
        network: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        network.load_state_dict(self._tensors(number), strict=False)
        return network.eval()

    def _tensors(self, number: int) -> Tensors:
        numbers = torch.Generator().manual_seed(number)
        return {
            name: tensor + _NOISE * tensor.std() * torch.randn(tensor.shape, generator=numbers)
            if tensor.dim() > 1
            else tensor
            for name, tensor in sorted(self._base.items())
        }

    def _write_set(self, number: int) -> Path:
        directory = self._folder / f"set-{number:02}"
        directory.mkdir(parents=True)
        save_weights(self._tensors(number), directory)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((CHECKPOINT / name).read_bytes())
        return directory
