"""Peak memory of log-probabilities and their gradient, each figure in a process of its own: `python -m
benchmarks.trainer.memory VOCABULARY TOKENS chunked|whole` prints megabytes.

The figure is the growth of the process's peak resident memory from the moment when the inputs and the head's weights
are in place.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIZES = ((32_768, 1_024), (32_768, 4_096), (131_072, 1_024), (131_072, 4_096))
"""Vocabulary and tokens: 128 MiB to 2 GiB of float32 logits."""
WHOLE = ((32_768, 1_024), (32_768, 4_096))
"""Sizes that are also computed in one piece, for comparison."""
_HIDDEN = 32


def peak_mb(vocabulary: int, tokens: int, how: str) -> float:
    command = [sys.executable, "-m", "benchmarks.trainer.memory", str(vocabulary), str(tokens), how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _measure(vocabulary: int, tokens: int, how: str) -> float:
    import torch

    from trainer.algorithm.logprobs import LOGITS_PER_CHUNK, token_logprobs

    torch.set_num_threads(1)
    head = torch.nn.Linear(_HIDDEN, vocabulary, bias=False)
    hidden = torch.randn(tokens, _HIDDEN, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    ones = torch.ones(tokens)
    small = token_logprobs(head, hidden[:1], targets[:1], ones[:1], vocabulary)[0]
    torch.autograd.backward(small.sum())  # the head's gradient exists, and libraries are loaded
    before = _kilobytes("VmRSS")
    limit = LOGITS_PER_CHUNK if how == "chunked" else vocabulary * tokens
    logprobs, _ = token_logprobs(head, hidden, targets, ones, vocabulary, limit)
    torch.autograd.backward(logprobs.sum())
    return (_kilobytes("VmHWM") - before) * 1024 / 1e6


def _kilobytes(name: str) -> int:
    """Read this process's memory: `VmRSS` is the present, `VmHWM` the largest size. getrusage would start from its
    parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


if __name__ == "__main__":
    print(round(_measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]), 1))
